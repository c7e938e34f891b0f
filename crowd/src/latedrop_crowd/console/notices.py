"""Send alarms by web hook (HTTP POST of JSON), MQTT or e-mail, with retries and bounded queues.

MQTT is version 3.1.1 with quality of service 1: a connection is made, one message is published and acknowledged. A
password is sent to a mail server only over TLS.
"""

import json
import logging
import queue
import re
import smtplib
import socket
import ssl
import struct
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from email.message import EmailMessage
from threading import Event, Thread
from typing import Any
from urllib.parse import SplitResult, unquote, urlsplit

from latedrop.errors import ArgumentError

__all__ = ["Notices", "mail", "publish"]

_WAITING, _TRIES, _TIMEOUT, _LONGEST = 100, 6, 10.0, 60.0
_ADDRESS = re.compile(r"[^@\s<>,;\"]+@[^@\s<>,;\"]+")
_logger = logging.getLogger(__name__)


class Notices:
    """Deliver messages, each target in its own thread, so that a slow target delays neither counting nor others.

    Targets are `http://`, `https://`, `mqtt://[user:password@]host[:port]/topic` (`mqtts://` with TLS) and
    `smtp://[user:password@]host[:port]/someone@example.org` (`smtps://` with TLS from the start). A message is tried
    again after `wait` seconds, doubled each time.
    """

    def __init__(self, targets: Sequence[str], wait: float = 1.0) -> None:
        hosts = [_checked(target).hostname or "" for target in targets]
        self.targets = list(targets)
        self._lines = [_Line(target, host, wait) for target, host in zip(targets, hosts, strict=True)]

    @property
    def sent(self) -> int:
        """Return the number of delivered messages."""
        return sum(line.sent for line in self._lines)

    @property
    def dropped(self) -> int:
        """Return the number of messages given up after all retries or for a full queue."""
        return sum(line.dropped for line in self._lines)

    def send(self, message: Mapping[str, Any]) -> None:
        """Put a message into every queue; a full queue drops its oldest message."""
        body = json.dumps(message).encode()
        for line in self._lines:
            line.put(body)

    def close(self) -> None:
        """Stop; messages still queued are lost."""
        for line in self._lines:
            line.stop.set()


class _Line:
    """Deliver a queue of messages to one target."""

    def __init__(self, target: str, host: str, wait: float) -> None:
        self._target, self._host, self._wait = target, host, wait
        self.sent = self.dropped = 0
        self.stop = Event()
        self._queue: queue.Queue[bytes] = queue.Queue(_WAITING)
        Thread(target=self._run, name=f"notices to {host}", daemon=True).start()

    def put(self, body: bytes) -> None:
        while True:
            try:
                self._queue.put_nowait(body)
                return
            except queue.Full:
                with suppress(queue.Empty):
                    self._queue.get_nowait()
                    self.dropped += 1

    def _run(self) -> None:
        while not self.stop.is_set():
            with suppress(queue.Empty):
                self._deliver(self._queue.get(timeout=0.5))

    def _deliver(self, body: bytes) -> None:
        ways: dict[str, Callable[[str, bytes], None]] = {"http": _post, "mqtt": publish, "smtp": mail}
        deliver = ways[self._target[:4].lower()]
        wait = self._wait
        for _ in range(_TRIES):
            try:
                deliver(self._target, body)
                self.sent += 1
                return
            except Exception as error:  # a foreign server can cause any error
                _logger.info("a notice to %s was not delivered: %s", self._host, type(error).__name__)
                if self.stop.wait(wait):
                    return
                wait = min(2 * wait, _LONGEST)
        self.dropped += 1
        _logger.warning("a notice to %s was not delivered after all retries", self._host)


def _checked(target: str) -> SplitResult:
    try:
        parts = urlsplit(target)
        parts.port  # noqa: B018 - raises where it is no number
    except ValueError:
        parts = urlsplit("")
    topic = parts.path.strip("/")
    if parts.scheme not in ("http", "https", "mqtt", "mqtts", "smtp", "smtps") or not parts.hostname:
        raise ArgumentError(
            "expected an http(s)://, mqtt(s):// or smtp(s):// address with a host for --notify; found "
            f"{parts.scheme or 'another'!r}. See latedrop crowd watch --help."
        )
    if parts.scheme.startswith("http") and (parts.username is not None or not target.isprintable() or " " in target):
        raise ArgumentError(
            "expected an http(s):// address without user, password and spaces; found one with them. Leave them out."
        )
    if parts.scheme.startswith("mqtt") and (not topic or "#" in target or "+" in topic):
        raise ArgumentError("expected mqtt://host/topic, without # and + in the topic; found another. Name one topic.")
    if parts.scheme.startswith("smtp") and not _ADDRESS.fullmatch(unquote(topic)):
        raise ArgumentError(
            "expected smtp://host/someone@example.org; found no e-mail address. Add the one that alarms are sent to."
        )
    return parts


def _post(target: str, body: bytes) -> None:
    request = urllib.request.Request(target, body, {"Content-Type": "application/json"}, method="POST")
    with urllib.request.urlopen(request, timeout=_TIMEOUT) as answer:
        answer.read(1024)


def mail(target: str, body: bytes) -> None:
    """Send one e-mail, with the recipient as sender; raise `OSError` if the server refuses it."""
    parts, fields = _checked(target), json.loads(body)
    message = EmailMessage()
    message["To"] = message["From"] = unquote(parts.path.strip("/"))
    subject = " ".join(str(fields.get(key, "")) for key in ("event", "source", "zone"))
    message["Subject"] = f"latedrop: {' '.join(subject.split())}"
    message.set_content("".join(f"{name}: {value}\n" for name, value in fields.items()))
    secure = parts.scheme == "smtps"
    context = ssl.create_default_context()
    wire: smtplib.SMTP
    if secure:
        wire = smtplib.SMTP_SSL(parts.hostname or "", parts.port or 465, timeout=_TIMEOUT, context=context)
    else:
        wire = smtplib.SMTP(parts.hostname or "", parts.port or 587, timeout=_TIMEOUT)
    with wire:
        wire.ehlo()
        if not secure and wire.has_extn("starttls"):
            wire.starttls(context=context)
            secure = True
        if parts.username is not None:
            if not secure:
                raise OSError(
                    "expected TLS for the password; the mail server offers no TLS. Use smtps://, or another server."
                )
            wire.login(unquote(parts.username), unquote(parts.password or ""))
        wire.send_message(message)


def publish(target: str, body: bytes) -> None:
    """Publish one MQTT message; raise `OSError` unless the broker acknowledges it."""
    parts = _checked(target)
    secure = parts.scheme == "mqtts"
    port = parts.port or (8883 if secure else 1883)
    with socket.create_connection((parts.hostname or "", port), _TIMEOUT) as plain:
        wire = ssl.create_default_context().wrap_socket(plain, server_hostname=parts.hostname) if secure else plain
        user, password = (None if word is None else unquote(word) for word in (parts.username, parts.password))
        flags = 2 | (128 if user is not None else 0) | (64 if password is not None else 0)
        hello = _text("MQTT") + bytes([4, flags]) + struct.pack("!H", 60) + _text("")
        hello += b"".join(_text(word) for word in (user, password) if word is not None)
        wire.sendall(_packet(0x10, hello))
        if _answer(wire, 0x20)[1:2] != b"\0":
            raise OSError("the broker refused the connection")
        wire.sendall(_packet(0x32, _text(parts.path.strip("/")) + struct.pack("!H", 1) + body))
        _answer(wire, 0x40)
        wire.sendall(_packet(0xE0, b""))


def _text(word: str) -> bytes:
    content = word.encode()
    return struct.pack("!H", len(content)) + content


def _packet(kind: int, content: bytes) -> bytes:
    length, left = b"", len(content)
    while True:
        left, digit = left >> 7, left & 127
        length += bytes([digit | (128 if left else 0)])
        if not left:
            return bytes([kind]) + length + content


def _answer(wire: socket.socket, kind: int) -> bytes:
    """Read a short packet of this kind; return its content."""
    head = _received(wire, 2)
    content = _received(wire, head[1] & 127)
    if head[0] & 0xF0 != kind:
        raise OSError("the broker gave another answer")
    return content


def _received(wire: socket.socket, number: int) -> bytes:
    content = b""
    while len(content) < number:
        more = wire.recv(number - len(content))
        if not more:
            raise OSError("the broker closed the connection")
        content += more
    return content
