"""What looks like a secret: code is kept on servers and read by whoever may read a job's files.

By name, and by content where that is beyond doubt: a private key or a kubeconfig by any name.
"""

import re
from functools import cache
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathspec import GitIgnoreSpec

# By the rules of .gitignore; those with a slash at their end are folders, all others files.
_FOLDERS = (
    *(".ssh/", ".aws/", ".azure/", ".gcloud/", ".oci/", ".gnupg/", ".config/", ".kube/"),
    *(".docker/", ".kaggle/", ".huggingface/", ".pip/", ".terraform/", ".vault/"),
)
_FILES = (
    *(".env", ".env.*", "!.env.example", "!.env.sample", "!.env.template", ".envrc"),
    *("id_rsa", "id_dsa", "id_ecdsa", "id_ecdsa_sk", "id_ed25519", "id_ed25519_sk", "*.ppk"),
    *("*.pem", "*.key", "*.p12", "*.pfx", "*.jks", "*.keystore", "*.kdbx", "*.agekey"),
    *(
        ".netrc",
        "_netrc",
        ".pypirc",
        "pip.conf",
        ".npmrc",
        ".yarnrc",
        ".condarc",
        "credentials",
        "credentials.json",
        "credentials.toml",
    ),
    *(
        ".git-credentials",
        ".pgpass",
        ".my.cnf",
        ".mylogin.cnf",
        ".s3cfg",
        ".boto",
        ".databrickscfg",
    ),
    *(
        "rclone.conf",
        ".dockercfg",
        ".dockerconfigjson",
        ".htpasswd",
        ".vault-token",
        ".terraformrc",
        ".smbcredentials",
    ),
    *("kubeconfig", "kubeconfig.*", "*.kubeconfig", "*.kubeconfig.*", "*.tfstate", "*.tfstate.*"),
    *("kaggle.json", "client_secret*.json", "service-account*.json", "service_account*.json"),
    *("application_default_credentials.json", "token", "*.token", "*-token", ".wandb-key"),
)
_MOST_BYTES = 1 << 20
_SOURCE = frozenset((".py", ".pyi", ".c", ".cc", ".cpp", ".cu", ".h", ".md", ".rst", ".ipynb"))
_PRIVATE_KEY = re.compile(rb"(?m)^[ \t]*-----BEGIN (?:[A-Z0-9]+ )*PRIVATE KEY(?: BLOCK)?-----")
_IN_JSON = re.compile(rb'"private_key"\s*:\s*"-----BEGIN ')
_PUTTY = b"PuTTY-User-Key-File-"
_KUBECONFIG = (
    re.compile(rb'(?m)^\s*"?kind"?\s*:\s*"?Config"?\s*,?\s*$'),
    re.compile(rb'(?m)^\s*"?users"?\s*:'),
    re.compile(rb'(?m)^\s*"?clusters"?\s*:'),
)


def by_name(name: str) -> bool:
    """Whether a path, relative and with slashes, a folder's with one at its end, names a secret."""
    is_folder = name.endswith("/")
    own = PurePosixPath(name).name  # what is above it was asked for before
    return _named(_FOLDERS).match_file(f"{own}/") if is_folder else _named(_FILES).match_file(own)


def by_content(path: Path, size: int) -> str:
    """What secret a file of `size` bytes holds; empty where it is none, or source code.

    Raises:
        OSError: it cannot be read.
    """
    if not 0 < size <= _MOST_BYTES or path.suffix in _SOURCE:
        return ""
    data = path.read_bytes()
    if _PRIVATE_KEY.search(data) or _IN_JSON.search(data) or data.startswith(_PUTTY):
        return "a private key"
    if all(sign.search(data) for sign in _KUBECONFIG):
        return "what opens a Kubernetes cluster"
    return ""


@cache
def _named(patterns: tuple[str, ...]) -> "GitIgnoreSpec":
    from pathspec import GitIgnoreSpec

    return GitIgnoreSpec.from_lines(patterns)
