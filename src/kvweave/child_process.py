"""What child processes see: nothing of the working directory, and none of our secrets.

Parsers, downloads and compilers run where somebody else's files lie. A `json.py` among those must
not be imported, and a parser that is taken over must not find the keys of the server.
"""

import os

FOLDER = os.path.abspath(os.sep)  # children work here: nobody but the system's owner writes it
# Variables that a child has. One that ends with _ stands for all that begin so.
_EVERY = (
    *("PATH", "HOME", "USER", "LOGNAME", "LANG", "LANGUAGE", "LC_", "TZ", "TMPDIR", "TEMP", "TMP"),
    *("LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "VIRTUAL_ENV", "PYTHONHOME", "PYTHONUSERBASE"),
    *("PYTHONNOUSERSITE", "PYTHONUTF8", "PYTHONDONTWRITEBYTECODE", "PYTHONPYCACHEPREFIX"),
)
_PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY")
DOWNLOADS = (
    *_PROXIES,
    *map(str.lower, _PROXIES),
    *("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "NETRC", "XDG_"),
)
COMPILERS = (
    *("CPATH", "C_INCLUDE_PATH", "LIBRARY_PATH", "COMPILER_PATH", "GCC_EXEC_PREFIX", "NIX_"),
    *("SDKROOT", "DEVELOPER_DIR", "MACOSX_DEPLOYMENT_TARGET", "CCACHE_"),
)


def make_child_environment(*names: str) -> dict[str, str]:
    """Return the variables that every child has, and those of `names` that are set here.

    What names a file from the working directory ("./pip.conf") names it from anywhere. Start Python
    with -P, or it puts its working directory in front of its own modules.
    """
    exact = {name for name in (*_EVERY, *names) if not name.endswith("_")}
    begins = tuple(name for name in (*_EVERY, *names) if name.endswith("_"))
    kept = {
        name: os.path.abspath(value) if value.startswith(("./", "../")) else value
        for name, value in os.environ.items()
        if name in exact or name.startswith(begins)
    }
    # an empty part of it is the working directory
    paths = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    found = os.pathsep.join(map(os.path.abspath, paths))
    return kept | ({"PYTHONPATH": found} if found else {}) | {"PYTHONSAFEPATH": "1"}
