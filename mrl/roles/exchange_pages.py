"""Where an exchange daemon shows /metrics for Prometheus and /health: on loopback, unless configured otherwise."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import structlog
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

from mrl.config.run_folder import RunFolder
from mrl.config.schema import ExchangeTable
from mrl.errors import AddressError
from mrl.exchange.exposition import Exposition
from mrl.exchange.pages import Page, PageServer
from mrl.exchange.shards import endpoint_of
from mrl.transport.endpoints import port_of, publish_endpoint, read_endpoint

JSON = "application/json"

Pages = Mapping[str, Callable[[], Page]]

log = structlog.get_logger()


def pages_endpoint_of(shard: int) -> str:
    """The name of the endpoint file that says where a shard's pages are."""
    return f"{endpoint_of(shard)}-metrics"


@contextmanager
def served(exposition: Exposition, table: ExchangeTable, folder: RunFolder, shard: int) -> Iterator[str]:
    """Serve the pages, publish where, and give their address; "" when the configuration wants none.

    Raises AddressError when the configured port cannot be had.
    """
    name = pages_endpoint_of(shard)
    if not table.metrics_host:
        (folder.endpoints / f"{name}.json").unlink(missing_ok=True)
        yield ""
        return
    server = _listen(_pages(exposition), table.metrics_host, table.metrics_port_of(shard), folder.endpoints, name)
    try:
        publish_endpoint(folder.endpoints, name, f"tcp://{server.host}:{server.port}")
        url = f"http://{server.host}:{server.port}"
        log.info("exchange shows its metrics", url=f"{url}/metrics")
        yield url
    finally:
        server.close()


def _pages(exposition: Exposition) -> Pages:
    def health() -> Page:
        status, body = exposition.health()
        return Page(status, JSON, body)

    return {"/metrics": lambda: Page(200, CONTENT_TYPE_PLAIN_0_0_4, exposition.metrics()), "/health": health}


def _listen(pages: Pages, host: str, port: int, endpoints: Path, name: str) -> PageServer:
    """Where any port will do, on the one of the last daemon if it is free: scrapers need not search."""
    previous = 0 if port else port_of(read_endpoint(endpoints, name))
    if previous:
        try:
            return PageServer(pages, host=host, port=previous)
        except AddressError:
            return PageServer(pages, host=host, port=0)
    return PageServer(pages, host=host, port=port)
