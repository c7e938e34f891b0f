"""Alarms told to others: tried again, bounded, and acknowledged by a broker."""

import json
import socket
import struct
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread
from typing import Any

import pytest

from latedrop.errors import ArgumentError
from latedrop_crowd.console.notices import Notices, mail, publish
from waiting import waited


def test_a_hook_that_fails_is_tried_again() -> None:
    got: list[Any] = []

    class Hook(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            got.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200 if len(got) > 2 else 503)
            self.end_headers()

        def log_message(self, *_: object) -> None: ...

    server = HTTPServer(("127.0.0.1", 0), Hook)
    Thread(target=server.serve_forever, daemon=True).start()
    notices = Notices([f"http://127.0.0.1:{server.server_port}/hook"], wait=0.01)
    notices.send({"event": "alarm", "count": 12})
    waited(lambda: notices.sent == 1)
    notices.close()
    server.shutdown()
    server.server_close()
    assert got == [{"event": "alarm", "count": 12}] * 3
    assert notices.dropped == 0


def test_what_waits_is_bounded() -> None:
    notices = Notices(["http://127.0.0.1:9/nobody"], wait=30.0)
    for number in range(500):
        notices.send({"number": number})
    assert notices.dropped >= 398
    notices.close()


def test_a_target_that_is_not_there_holds_up_no_other() -> None:
    got: list[bytes] = []
    listening = socket.create_server(("127.0.0.1", 0))

    def answer() -> None:
        for said in (b"no HTTP at all\r\n\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"):
            wire, _ = listening.accept()
            with wire:
                got.append(wire.recv(65536))
                wire.sendall(said)

    thread = Thread(target=answer)
    thread.start()
    notices = Notices(["http://127.0.0.1:9/nobody", f"http://127.0.0.1:{listening.getsockname()[1]}/hook"], wait=0.5)
    notices.send({"event": "alarm"})
    waited(lambda: notices.sent == 1)
    assert notices.dropped == 0  # the first one is still tried
    thread.join(5)
    listening.close()
    notices.close()
    assert len(got) == 2  # an answer that is no HTTP is tried again, too


def mail_server(got: list[str]) -> tuple[socket.socket, Thread]:
    """A server for one connection, which notes all lines."""
    listening = socket.create_server(("127.0.0.1", 0))
    answers = {"DATA": b"354 go on\r\n", "QUIT": b"221 bye\r\n"}

    def serve() -> None:
        wire, _ = listening.accept()
        with wire, wire.makefile("rwb", buffering=0) as file:
            file.write(b"220 here\r\n")
            content = False
            for line in file:
                got.append(line.decode().rstrip("\r\n"))
                content = content and got[-1] != "."
                if not content:
                    word = got[-1].partition(" ")[0].upper()
                    content = word == "DATA"
                    file.write(answers.get(word, b"250 good\r\n"))
                if got[-1].upper() == "QUIT":
                    return

    thread = Thread(target=serve, daemon=True)
    thread.start()
    return listening, thread


def test_an_alarm_by_mail() -> None:
    got: list[str] = []
    listening, thread = mail_server(got)
    target = f"smtp://127.0.0.1:{listening.getsockname()[1]}/guard@example.org"
    zone = "Stairs\r\nBcc: others@example.org"
    mail(target, json.dumps({"event": "alarm", "source": "square", "zone": zone, "count": 13.2}).encode())
    thread.join(5)
    listening.close()
    assert "rcpt TO:<guard@example.org>" in got
    assert sum(line.lower().startswith("rcpt") for line in got) == 1
    head = got[got.index("data") + 1 : got.index("")]
    assert "Subject: latedrop: alarm square Stairs Bcc: others@example.org" in head
    assert not any(line.startswith("Bcc") for line in head)
    assert "count: 13.2" in got


def test_no_password_without_tls() -> None:
    got: list[str] = []
    listening, thread = mail_server(got)
    with pytest.raises(OSError, match="offers no TLS"):
        mail(f"smtp://me:secret@127.0.0.1:{listening.getsockname()[1]}/guard@example.org", b'{"event": "alarm"}')
    thread.join(5)
    listening.close()
    assert not any("secret" in line or line.upper().startswith("AUTH") for line in got)


def test_a_message_to_a_broker() -> None:
    got: dict[str, bytes] = {}
    listening = socket.create_server(("127.0.0.1", 0))

    def packet(wire: socket.socket) -> tuple[int, bytes]:
        kind, length = wire.recv(1)[0], wire.recv(1)[0]
        if length & 128:
            length = (length & 127) + (wire.recv(1)[0] << 7)
        content = b""
        while len(content) < length:
            content += wire.recv(length - len(content))
        return kind, content

    def broker() -> None:
        wire, _ = listening.accept()
        with wire:
            kind, got["hello"] = packet(wire)
            assert kind == 0x10
            wire.sendall(bytes([0x20, 2, 0, 0]))
            kind, got["message"] = packet(wire)
            wire.sendall(bytes([0x40, 2]) + struct.pack("!H", 1))
            assert packet(wire)[0] == 0xE0

    thread = Thread(target=broker)
    thread.start()
    body = json.dumps({"text": "x" * 300}).encode()
    publish(f"mqtt://user:p%40ss@127.0.0.1:{listening.getsockname()[1]}/square/alarms", body)
    thread.join(5)
    listening.close()
    assert got["hello"].endswith(b"\x00\x04user\x00\x04p@ss")
    assert got["message"] == struct.pack("!H", 13) + b"square/alarms" + struct.pack("!H", 1) + body


WRONG = "ftp://x/y mqtt://host mqtt://host/a/# nonsense http:// http://host:door/ http://[ https://me:word@host/"


@pytest.mark.parametrize("target", [*WRONG.split(), "http://host/a b"])
def test_addresses_that_cannot_be_told(target: str) -> None:
    with pytest.raises(ArgumentError, match="expected"):
        Notices([target])
