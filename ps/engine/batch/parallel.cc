#include "batch/parallel.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <deque>
#include <exception>
#include <memory>
#include <mutex>
#include <thread>

namespace heterps::ps {
namespace {

struct Job {
  size_t n;
  const std::function<void(size_t)>* task;
  std::atomic<size_t> next{0};
  std::mutex mutex;
  std::condition_variable idle;
  size_t busy = 0;  // pool threads inside Work
  std::exception_ptr error;

  void Work() {
    try {
      for (size_t i; (i = next.fetch_add(1)) < n;) (*task)(i);
    } catch (...) {
      std::lock_guard lock(mutex);
      if (!error) error = std::current_exception();
      next.store(n);
    }
  }
};

class Pool {
 public:
  explicit Pool(size_t threads) {
    for (size_t i = 0; i < threads; ++i) std::thread([this] { Serve(); }).detach();
  }

  void Run(const std::shared_ptr<Job>& job, size_t helpers) {
    {
      std::lock_guard lock(mutex_);
      for (size_t i = 0; i < helpers; ++i) queue_.push_back(job);
    }
    wake_.notify_all();
    job->Work();
    std::unique_lock lock(job->mutex);
    job->idle.wait(lock, [&] { return job->busy == 0; });
    if (job->error) std::rethrow_exception(job->error);
  }

 private:
  [[noreturn]] void Serve() {
    for (;;) {
      std::shared_ptr<Job> job;
      {
        std::unique_lock lock(mutex_);
        wake_.wait(lock, [&] { return !queue_.empty(); });
        job = std::move(queue_.front());
        queue_.pop_front();
      }
      {
        std::lock_guard lock(job->mutex);
        // Begun too late: the caller may be gone, and with it its task.
        if (job->next.load() >= job->n) continue;
        ++job->busy;
      }
      job->Work();
      {
        std::lock_guard lock(job->mutex);
        --job->busy;
      }
      job->idle.notify_one();
    }
  }

  std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<std::shared_ptr<Job>> queue_;
};

size_t Helpers() { return std::clamp<size_t>(std::thread::hardware_concurrency(), 1, 8) - 1; }

// Leaked on purpose: its threads may outlive static destruction.
Pool* Current() {
  static std::atomic<Pool*> pool{nullptr};
  static std::atomic<pid_t> owner{0};
  static std::mutex mutex;
  const pid_t pid = ::getpid();
  if (owner.load(std::memory_order_acquire) != pid) {
    std::lock_guard lock(mutex);
    if (owner.load() != pid) {
      pool.store(new Pool(Helpers()));
      owner.store(pid, std::memory_order_release);
    }
  }
  return pool.load();
}

}  // namespace

size_t Threads() { return Helpers() + 1; }

void ParallelFor(size_t n, const std::function<void(size_t)>& task) {
  const size_t helpers = std::min(Helpers(), n - std::min<size_t>(n, 1));
  if (helpers == 0) {
    for (size_t i = 0; i < n; ++i) task(i);
    return;
  }
  auto job = std::make_shared<Job>();
  job->n = n;
  job->task = &task;
  Current()->Run(job, helpers);
}

}  // namespace heterps::ps
