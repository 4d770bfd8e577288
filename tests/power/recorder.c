// Preloaded into a process: keeps a record of what it does to files below a folder, in order, so
// that tests/power/disk.py can tell which of it a disk may lack after a loss of power.
//
// HETERPS_POWER_ROOT: the folder. HETERPS_POWER_LOG: the record, which many processes append to.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

static pthread_mutex_t turn = PTHREAD_MUTEX_INITIALIZER;  // an operation and its record are one
static int record_file = -1;
static char root[PATH_MAX];

struct head {
  char kind;
  char pad[7];
  uint64_t file;  // its inode
  uint64_t at;
  uint32_t first, second;  // bytes that follow
};

__attribute__((constructor)) static void begin(void) {
  const char* below = getenv("HETERPS_POWER_ROOT");
  const char* log = getenv("HETERPS_POWER_LOG");
  if (!below || !log) return;
  snprintf(root, sizeof root, "%s/", below);
  record_file = REAL(open)(log, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0600);
}

static void put(char kind, uint64_t file, uint64_t at, const void* a, size_t first, const void* b,
                size_t second) {
  struct head head = {.kind = kind, .file = file, .at = at};
  head.first = (uint32_t)first;
  head.second = (uint32_t)second;
  struct iovec parts[3] = {{&head, sizeof head}, {(void*)a, first}, {(void*)b, second}};
  ssize_t whole = (ssize_t)(sizeof head + first + second);
  if (REAL(writev)(record_file, parts, 3) != whole) abort();
}

static int below(const char* path) {
  return record_file >= 0 && strncmp(path, root, strlen(root)) == 0;
}

// The path of a file that is open; whether it lies below the folder.
static int path_of(int file, char* path) {
  char link[64];
  if (record_file < 0) return 0;
  snprintf(link, sizeof link, "/proc/self/fd/%d", file);
  ssize_t size = readlink(link, path, PATH_MAX - 2);
  if (size < 0) return 0;
  path[size] = '/';  // so that the folder itself is below
  path[size + 1] = 0;
  int found = below(path);
  path[size] = 0;
  return found;
}

static int resolved(int folder, const char* path, char* whole) {
  if (path[0] == '/' || record_file < 0) {
    snprintf(whole, PATH_MAX, "%s", path);
  } else if (folder == AT_FDCWD) {
    char here[PATH_MAX];
    if (!getcwd(here, sizeof here)) return 0;
    snprintf(whole, PATH_MAX, "%.2000s/%.2000s", here, path);
  } else {
    char here[PATH_MAX];
    if (!path_of(folder, here)) return 0;
    snprintf(whole, PATH_MAX, "%.2000s/%.2000s", here, path);
  }
  return below(whole);
}

static uint64_t number_of(int file) {
  struct stat found;
  return fstat(file, &found) == 0 ? found.st_ino : 0;
}

static int open_at(int folder, const char* path, int flags, mode_t mode) {
  char whole[PATH_MAX];
  if (!(flags & (O_CREAT | O_TRUNC)) || !resolved(folder, path, whole))
    return REAL(openat)(folder, path, flags, mode);
  pthread_mutex_lock(&turn);
  struct stat before;
  int was_there = stat(whole, &before) == 0;
  int file = REAL(openat)(folder, path, flags, mode);
  if (file >= 0 && !was_there) put('O', number_of(file), 0, whole, strlen(whole), "", 0);
  if (file >= 0 && was_there && flags & O_TRUNC) put('T', number_of(file), 0, "", 0, "", 0);
  pthread_mutex_unlock(&turn);
  return file;
}

#define WITH_MODE               \
  mode_t mode = 0;              \
  if (flags & O_CREAT) {        \
    va_list more;               \
    va_start(more, flags);      \
    mode = va_arg(more, mode_t); \
    va_end(more);               \
  }

int open(const char* path, int flags, ...) {
  WITH_MODE return open_at(AT_FDCWD, path, flags, mode);
}
int open64(const char* path, int flags, ...) {
  WITH_MODE return open_at(AT_FDCWD, path, flags, mode);
}
int openat(int folder, const char* path, int flags, ...) {
  WITH_MODE return open_at(folder, path, flags, mode);
}
int openat64(int folder, const char* path, int flags, ...) {
  WITH_MODE return open_at(folder, path, flags, mode);
}

// Writes. `at` below zero: where the file's position is.
static ssize_t written(int file, const struct iovec* parts, int count, off_t at) {
  char path[PATH_MAX];
  if (!path_of(file, path))
    return at < 0 ? REAL(writev)(file, parts, count) : REAL(pwritev)(file, parts, count, at);
  pthread_mutex_lock(&turn);
  off_t begin = at < 0 ? lseek(file, 0, fcntl(file, F_GETFL) & O_APPEND ? SEEK_END : SEEK_CUR) : at;
  ssize_t done =
      at < 0 ? REAL(writev)(file, parts, count) : REAL(pwritev)(file, parts, count, at);
  ssize_t left = done;
  for (int i = 0; i < count && left > 0; ++i) {
    size_t size = (size_t)left < parts[i].iov_len ? (size_t)left : parts[i].iov_len;
    put('W', number_of(file), (uint64_t)begin, parts[i].iov_base, size, "", 0);
    begin += (off_t)size;
    left -= (ssize_t)size;
  }
  pthread_mutex_unlock(&turn);
  return done;
}

ssize_t write(int file, const void* data, size_t size) {
  char path[PATH_MAX];
  if (!path_of(file, path)) return REAL(write)(file, data, size);
  struct iovec part = {(void*)data, size};
  return written(file, &part, 1, -1);
}
ssize_t writev(int file, const struct iovec* parts, int count) {
  return written(file, parts, count, -1);
}
ssize_t pwrite(int file, const void* data, size_t size, off_t at) {
  struct iovec part = {(void*)data, size};
  return written(file, &part, 1, at);
}
ssize_t pwrite64(int file, const void* data, size_t size, off_t at) {
  return pwrite(file, data, size, at);
}
ssize_t pwritev(int file, const struct iovec* parts, int count, off_t at) {
  return written(file, parts, count, at);
}
ssize_t pwritev64(int file, const struct iovec* parts, int count, off_t at) {
  return written(file, parts, count, at);
}

// What os.pwritev calls; our writers give no flags.
ssize_t pwritev2(int file, const struct iovec* parts, int count, off_t at, int flags) {
  char path[PATH_MAX];
  if (flags || !path_of(file, path)) return REAL(pwritev2)(file, parts, count, at, flags);
  return written(file, parts, count, at);
}
ssize_t pwritev64v2(int file, const struct iovec* parts, int count, off_t at, int flags) {
  return pwritev2(file, parts, count, at, flags);
}

int ftruncate(int file, off_t size) {
  char path[PATH_MAX];
  if (!path_of(file, path)) return REAL(ftruncate)(file, size);
  pthread_mutex_lock(&turn);
  int failed = REAL(ftruncate)(file, size);
  if (!failed) put('T', number_of(file), (uint64_t)size, "", 0, "", 0);
  pthread_mutex_unlock(&turn);
  return failed;
}
int ftruncate64(int file, off_t size) { return ftruncate(file, size); }

// Not the disk's own sync: the record alone says what it would have kept.
static int synced(int file, int (*real)(int)) {
  char path[PATH_MAX];
  if (!path_of(file, path)) return real(file);
  pthread_mutex_lock(&turn);
  struct stat found;
  fstat(file, &found);
  if (S_ISDIR(found.st_mode))
    put('D', 0, 0, path, strlen(path), "", 0);
  else
    put('S', found.st_ino, 0, "", 0, "", 0);
  pthread_mutex_unlock(&turn);
  return 0;
}
int fsync(int file) { return synced(file, REAL(fsync)); }
int fdatasync(int file) { return synced(file, REAL(fdatasync)); }

// Names.
#define RECORDED(kind, call)                                              \
  pthread_mutex_lock(&turn);                                              \
  int failed = call;                                                      \
  if (!failed) put(kind, 0, 0, from, strlen(from), to, strlen(to));       \
  pthread_mutex_unlock(&turn);                                            \
  return failed;

int renameat(int a, const char* old, int b, const char* new) {
  char from[PATH_MAX], to[PATH_MAX];
  if (!resolved(a, old, from) || !resolved(b, new, to)) return REAL(renameat)(a, old, b, new);
  RECORDED('R', REAL(renameat)(a, old, b, new))
}
int rename(const char* old, const char* new) { return renameat(AT_FDCWD, old, AT_FDCWD, new); }

int linkat(int a, const char* old, int b, const char* new, int flags) {
  char from[PATH_MAX], to[PATH_MAX];
  if (!resolved(a, old, from) || !resolved(b, new, to)) return REAL(linkat)(a, old, b, new, flags);
  RECORDED('L', REAL(linkat)(a, old, b, new, flags))
}
int link(const char* old, const char* new) { return linkat(AT_FDCWD, old, AT_FDCWD, new, 0); }

int unlinkat(int folder, const char* path, int flags) {
  char from[PATH_MAX], to[1] = "";
  if (!resolved(folder, path, from)) return REAL(unlinkat)(folder, path, flags);
  RECORDED('U', REAL(unlinkat)(folder, path, flags))
}
int unlink(const char* path) { return unlinkat(AT_FDCWD, path, 0); }
int rmdir(const char* path) { return unlinkat(AT_FDCWD, path, AT_REMOVEDIR); }

int mkdirat(int folder, const char* path, mode_t mode) {
  char from[PATH_MAX], to[1] = "";
  if (!resolved(folder, path, from)) return REAL(mkdirat)(folder, path, mode);
  RECORDED('M', REAL(mkdirat)(folder, path, mode))
}
int mkdir(const char* path, mode_t mode) { return mkdirat(AT_FDCWD, path, mode); }
