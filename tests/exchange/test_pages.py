"""The pages that a daemon serves, and who asks for them in bad faith."""

import http.client
import socket
import threading

import pytest

from mrl.errors import AddressError
from mrl.exchange.pages import MAX_CONNECTIONS, MAX_REQUEST_BYTES, TEXT, Page, PageServer


@pytest.fixture
def serve():
    """Starts servers on free ports of loopback."""
    servers = []

    def start(pages=None, **options):
        told = pages or {"/health": lambda: Page(200, TEXT, b"well\n")}
        servers.append(PageServer(told, host="127.0.0.1", port=0, **options))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


def get(server, path="/health", method="GET"):
    """(status, headers, body) of one request."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)
    connection.request(method, path)
    answer = connection.getresponse()
    told = answer.status, dict(answer.headers), answer.read()
    connection.close()
    return told


def dial(server):
    """A connection on which nothing was said."""
    return socket.create_connection(("127.0.0.1", server.port), timeout=10)


def hear(connection):
    """Everything until the server closes; a reset is an end too."""
    heard = b""
    try:
        while part := connection.recv(65_536):
            heard += part
    except ConnectionResetError:
        pass
    connection.close()
    return heard


def test_a_page_is_made_for_every_request(serve):
    """By its path, whatever follows a question mark."""
    numbers = iter(range(10))
    server = serve(
        {"/metrics": lambda: Page(200, "text/x", b"%d" % next(numbers)), "/health": lambda: Page(503, TEXT, b"")}
    )
    status, headers, body = get(server, "/metrics?x=1")
    assert (status, headers["Content-Type"], body) == (200, "text/x", b"0")
    assert get(server, "/metrics")[2] == b"1"
    assert get(server, "/health")[0] == 503


def test_head_has_the_length_and_no_body(serve):
    """As GET otherwise."""
    connection = dial(serve())
    connection.sendall(b"HEAD /health HTTP/1.1\r\n\r\n")
    head, _, body = hear(connection).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 OK\r\n")
    assert b"\r\nContent-Length: 5\r\n" in head
    assert body == b""


@pytest.mark.parametrize("path", ["/", "/metric", "/health/", "/../health", "//health", "/%2e/health"])
def test_any_other_path_is_not_found(serve, path):
    """There are no files behind it."""
    assert get(serve(), path)[0] == 404


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "TRACE", "CONNECT", "get"])
def test_nothing_but_reading_is_allowed(serve, method):
    """The pages change nothing."""
    status, headers, _ = get(serve(), method=method)
    assert (status, headers["Allow"]) == (405, "GET, HEAD")


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"GET",
        b"GET /health",
        b"GET /health FTP/1.0",
        b"GET  /health HTTP/1.1",
        b"GET /health HTTP/1.1 x",
        b"\xff\0 x y",
    ],
)
def test_what_is_no_request_is_refused(serve, line):
    """Also binary and empty lines."""
    connection = dial(serve())
    connection.sendall(line + b"\r\n\r\n")
    assert hear(connection).startswith(b"HTTP/1.1 400 ")


def test_a_request_that_is_too_long_is_refused(serve, until):
    """Its head is never kept beyond the limit."""
    server = serve()
    connection = dial(server)
    connection.sendall(b"GET /health HTTP/1.1\r\nX: " + b"x" * (2 * MAX_REQUEST_BYTES))
    assert hear(connection)[:12] in (b"HTTP/1.1 431", b"")  # a reset may overtake the answer
    until(lambda: server.counts["431"] == 1, within_s=3)
    assert get(server)[0] == 200


def test_a_slow_client_is_cut_off(serve, until):
    """Whether it never ends its request, byte by byte, or never begins; the others are served meanwhile."""
    server = serve(answer_s=0.3)
    silent, slow = dial(server), dial(server)
    end = threading.Event()

    def trickle():
        try:
            while not end.wait(0.02):
                slow.sendall(b"x")
        except OSError:
            pass

    thread = threading.Thread(target=trickle)
    thread.start()
    try:
        assert get(server)[0] == 200
        assert hear(silent) == b""
        until(lambda: server.counts["too_slow"] == 2)
    finally:
        end.set()
        thread.join()
        slow.close()


def test_a_client_that_does_not_read_is_cut_off(serve, until):
    """An answer that nobody takes is not kept for long."""
    server = serve({"/big": lambda: Page(200, TEXT, bytes(64 * 1024 * 1024))}, answer_s=0.3)
    connection = dial(server)
    connection.sendall(b"GET /big HTTP/1.1\r\n\r\n")
    until(lambda: server.counts["too_slow"] == 1)
    connection.close()


def test_connections_are_bounded(serve, until):
    """The one too many is closed at once; when some have gone, there is room again."""
    server = serve()
    open_ones = [dial(server) for _ in range(MAX_CONNECTIONS)]
    until(lambda: server.num_open == MAX_CONNECTIONS)
    assert hear(dial(server)) == b""
    assert server.counts["too_many"] == 1
    for connection in open_ones:
        connection.close()
    until(lambda: server.num_open == 0)
    assert get(server)[0] == 200
    assert server.counts["gone"] == MAX_CONNECTIONS


def test_a_page_that_fails_costs_its_request_only(serve):
    """The next one is served."""
    pages = {"/bad": lambda: 1 / 0, "/health": lambda: Page(200, TEXT, b"well\n")}
    server = serve(pages)
    assert get(server, "/bad")[0] == 500
    assert get(server)[0] == 200


@pytest.mark.parametrize("pause", range(10))
def test_close_ends_the_thread_and_frees_the_port(serve, pause):
    """Also while somebody connects, however far that has come, and twice."""
    server = serve()
    connection = dial(server)
    for _ in range(pause * 1000):
        pass
    server.close()
    server.close()
    assert not server.is_serving
    assert hear(connection) == b""
    with pytest.raises(ConnectionRefusedError):
        dial(server)


def test_a_busy_port_is_one_clear_line(serve):
    """With the cure."""
    port = serve().port
    with pytest.raises(
        AddressError, match=f"127.0.0.1:{port}: cannot listen: the port is busy; cure: set another port"
    ):
        PageServer({}, host="127.0.0.1", port=port)
