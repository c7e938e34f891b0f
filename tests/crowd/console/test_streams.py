"""Streams as cameras send them: MJPEG over HTTP and MPEG-4 over RTSP, from servers of this test."""

import io
import socket
import struct
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Condition, Thread
from typing import Any

import numpy as np
import pytest
from PIL import Image

av = pytest.importorskip("av", reason="PyAV reads streams")

from latedrop_crowd.console.sources import Camera, open_sources  # noqa: E402
from waiting import waited  # noqa: E402


def grey(number: int, width: int = 64, height: int = 48) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.full((height, width, 3), 20 * number, np.uint8)


class Mjpeg(BaseHTTPRequestHandler):
    """Ten frames, the last five larger; then the connection breaks."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "multipart/x-mixed-replace; boundary=frame")
        self.end_headers()
        for number in range(10):
            content = io.BytesIO()
            Image.fromarray(grey(number, *((64, 48) if number < 5 else (96, 72)))).save(content, "JPEG")
            picture = content.getvalue()
            head = f"--frame\r\nContent-Type: image/jpeg\r\nContent-Length: {len(picture)}\r\n\r\n"
            self.wfile.write(head.encode() + picture + b"\r\n")
            time.sleep(0.02)

    def log_message(self, format: str, *arguments: Any) -> None:
        """Say nothing."""


@pytest.fixture
def http_port() -> Iterator[int]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Mjpeg)
    Thread(target=server.serve_forever, daemon=True).start()
    yield server.server_port
    server.shutdown()
    server.server_close()


def test_mjpeg_over_http_comes_back_after_a_break(http_port: int) -> None:
    (source,) = open_sources([f"http://admin:secret@127.0.0.1:{http_port}/live.mjpg"])
    assert source.name == f"127.0.0.1:{http_port}/live.mjpg"
    shapes, said = set(), []
    camera = Camera(source, Condition(), 0.01, lambda kind, text: said.append((kind, text)))
    camera.start()

    def seen() -> bool:
        shot = camera.take()
        if shot is not None:
            shapes.add(shot.pixels.shape)
        return camera.number > 20 and len(shapes) == 2

    waited(seen)
    camera.close()
    assert shapes == {(48, 64, 3), (72, 96, 3)}
    assert [kind for kind, _ in said[:3]] == ["live", "lost", "live"]
    assert not [text for _, text in said if "secret" in text]


def test_rtsp() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        Thread(target=rtsp, args=(listening,), daemon=True).start()
        (source,) = open_sources([f"rtsp://127.0.0.1:{listening.getsockname()[1]}/stream"])
        frames = source.frames()
        actual = [next(frames) for _ in range(3)]
        frames.close()  # type: ignore[attr-defined]
    assert [frame.shape for frame in actual] == [(48, 64, 3)] * 3
    assert np.std([frame.mean() for frame in actual]) > 1


def rtsp(listening: socket.socket) -> None:
    """One client, over TCP: what it asks for, then RTP packets between the words (RFC 2326, 3016)."""
    wire, _ = listening.accept()
    host, port = listening.getsockname()
    message = f"v=0\r\no=- 0 0 IN IP4 {host}\r\ns=test\r\nc=IN IP4 {host}\r\nt=0 0\r\nm=video 0 RTP/AVP 96\r\n"
    message += "a=rtpmap:96 MP4V-ES/90000\r\na=control:track\r\n"
    answers = {
        "OPTIONS": ("Public: DESCRIBE, SETUP, PLAY, TEARDOWN\r\n", ""),
        "DESCRIBE": (f"Content-Base: rtsp://{host}:{port}/stream/\r\nContent-Type: application/sdp\r\n", message),
        "SETUP": ("Transport: RTP/AVP/TCP;unicast;interleaved=0-1\r\nSession: 7\r\n", ""),
        "PLAY": ("Session: 7\r\n", ""),
    }
    with wire, wire.makefile("rb") as read:
        method = ""
        while method != "PLAY":
            lines = list(iter(read.readline, b"\r\n"))
            method = lines[0].decode().split()[0]
            number = next(line for line in lines if line.lower().startswith(b"cseq")).decode().split()[1]
            head, body = answers[method]
            length = f"Content-Length: {len(body)}\r\n" if body else ""
            wire.sendall(f"RTSP/1.0 200 OK\r\nCSeq: {number}\r\n{head}{length}\r\n{body}".encode())
        try:
            for number, packet in enumerate(packets()):
                header = struct.pack(">BBHII", 0x80, 0x80 | 96, number, 9000 * number, 1) + packet
                wire.sendall(b"$\x00" + struct.pack(">H", len(header)) + header)
                time.sleep(0.02)
        except OSError:
            return  # the client has seen enough


def packets() -> Iterator[bytes]:
    """Frames as a camera encodes them, each a packet."""
    coder = av.CodecContext.create("mpeg4", "w")
    coder.width, coder.height, coder.pix_fmt, coder.gop_size = 64, 48, "yuv420p", 5
    coder.framerate = 10
    for number in range(200):
        frame = av.VideoFrame.from_ndarray(grey(number % 12), format="rgb24").reformat(format="yuv420p")
        yield from (bytes(packet) for packet in coder.encode(frame))
