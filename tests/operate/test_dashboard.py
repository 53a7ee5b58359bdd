"""The dashboard in a real browser, beside a service under load and faults."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, cast

import openai
import pytest

from multiworld.serve.controller.answers import TenantShown
from multiworld.serve.controller.client import Service
from multiworld.serve.dashboard.server import PageServer, make_dashboard
from tests.operate.browser import CHROMIUM, Tab, opened
from tests.operate.large_service import LargeService
from tests.serve.harness import ROOT, WAIT_S, Served, served
from tests.serve.texts import Stream, asked, client, spec_of
from tests.tiny_decoder import save_decoder

pytestmark = [
    pytest.mark.heavy,
    pytest.mark.timeout(300),
    pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium here"),
]


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    spec = spec_of(save_decoder(tmp_path_factory.mktemp("decoder")))
    spec["gateway"]["replicas"] = 2
    with served(tmp_path_factory.mktemp("shown"), spec) as made:
        yield made


@contextlib.contextmanager
def shown(service: Served) -> Iterator[str]:
    """Start ``multiworld dashboard``; yield the page's address."""
    words = ["dashboard", "--port", "0", "--state", str(service.state)]
    process = subprocess.Popen(
        [sys.executable, "-m", "multiworld.cli.main", *words],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    try:
        yield process.stdout.readline().split()[-1]
    finally:
        process.terminate()
        process.wait(WAIT_S)
        process.stdout.close()


@pytest.fixture(scope="module")
def page(service: Served) -> Iterator[str]:
    with shown(service) as address:
        yield address


@contextlib.asynccontextmanager
async def loaded(service: Served) -> AsyncIterator[None]:
    """Keep some streams running; none of them may be cut."""
    ended = asyncio.Event()

    async def ask() -> None:
        async with client(service) as api:
            while not ended.is_set():
                await Stream(api).end()

    asking = [asyncio.ensure_future(ask()) for _ in range(4)]
    try:
        yield
    finally:
        ended.set()
        await asyncio.gather(*asking)


async def test_page_shows_kills_and_how_they_heal(service: Served, page: str) -> None:
    async with loaded(service), opened(page) as tab:
        await tab.until_text("✓ ready")
        await tab.until("document.querySelectorAll('.replica.ready').length === 4")
        await tab.until("document.querySelectorAll('svg.chart path').length > 0")
        service.break_replica("kill", "middle")
        await tab.until_text("it ended with SIGKILL")
        await tab.click("kill one")
        await tab.click("Do it", "dialog")
        await tab.until_text("are continued by another")
        await tab.until("document.querySelectorAll('.replica.ready').length === 4")
        await tab.until_text("✓ ready")
        assert await numbers(tab, "streams cut") == "0"
        assert int(await numbers(tab, "saved")) > 0
        assert tab.errors == []


async def test_stream_is_found_and_cancelled(service: Served, page: str) -> None:
    async with opened(page) as tab, client(service) as api:
        await tab.until_text("✓ ready")
        headers = {"x-request-id": "order-7"}
        body = {**asked(180), "temperature": 1.0, "extra_headers": headers}
        tasks = [asyncio.ensure_future(streamed(api, body)) for _ in range(40)]
        await tab.until("document.querySelectorAll('.flows path').length > 0")
        await tab.click("order-7")
        await tab.until_text("Request order-7")
        await tab.click("Cancel it", "dialog")
        await tab.click("Do it", "dialog")
        ended = await asyncio.gather(*tasks)
        assert "cancelled" in ended
        await tab.until_text("request order-7 is cancelled")
        assert await numbers(tab, "streams cut") == "0"
        assert tab.errors == []


async def streamed(api: openai.AsyncOpenAI, body: dict[str, Any]) -> str | None:
    """Read a stream; return the code of its error, if it has one."""
    try:
        async for _ in await api.completions.create(**body, stream=True):
            pass
    except openai.APIError as error:
        return error.code
    return None


async def test_spec_is_updated_and_rolled_back(service: Served, page: str) -> None:
    async with opened(page) as tab:
        await tab.click("Show what runs")
        box = "document.querySelector('textarea[aria-label=spec]')"
        await tab.until(f"Boolean({box})")
        other = f"{box}.value.replace('deadline_s: 60.0', 'deadline_s: 61.0')"
        await tab.value(f"{box}.value = {other}")
        typed = "new Event('input', {bubbles: true})"
        await tab.value(f"{box}.dispatchEvent({typed})")
        await tab.click("Update")
        await tab.click("Do it", "dialog")
        await tab.until("!document.querySelector('dialog')")
        await tab.click("Read it again")
        back = "[...document.querySelectorAll('button')].find(b => "
        await tab.until(f"{back}b.innerText === 'Roll back' && !b.disabled)")
        assert "deadline_s: 61.0" in await tab.value(f"{box}.value")
        await tab.click("Roll back")
        await tab.click("Do it", "dialog")
        await tab.until("!document.querySelector('dialog')")
        await tab.click("Read it again")
        await tab.until(f"{box}.value.includes('deadline_s: 60.0')")
        assert tab.errors == []


async def test_tenant_gets_a_key_is_suspended_and_loses_the_key(
    service: Served, page: str
) -> None:
    def tenant() -> TenantShown:
        asking = Service(None, service.state)
        found: list[TenantShown] = asking.ask("GET", "/tenants", list[TenantShown])
        return next(each for each in found if each.name == "acme")

    async def press(label: str, words: str = "") -> None:
        button = f"document.querySelector('[aria-label=\"{label}\"]')"
        await tab.until(f"Boolean({button})")
        await tab.value(f"{button}.click()")
        await tab.until("Boolean(document.querySelector('dialog'))")
        if words:
            await fill("reason", words)
        await tab.click("Do it", "dialog")
        await tab.until("!document.querySelector('dialog')")

    async def fill(label: str, text: str) -> None:
        box = f"document.querySelector('input[aria-label=\"{label}\"]')"
        await tab.value(f"{box}.value = {text!r}")
        await tab.value(f"{box}.dispatchEvent(new Event('input', {{bubbles: true}}))")

    async with opened(page) as tab:
        await tab.click("Show tenants and keys")
        name = "name of a new tenant"
        await tab.until(f"Boolean(document.querySelector('[aria-label=\"{name}\"]'))")
        await fill(name, "acme")
        await tab.click("Create")
        await tab.click("Do it", "dialog")
        await tab.until("document.body.innerText.includes('mw-')")
        (key,) = tenant().keys
        await press("suspend acme", "the bill is not paid")
        assert tenant().suspension == "the bill is not paid"
        await tab.until("document.body.innerText.includes('the bill is not paid')")
        await press("resume acme")
        assert not tenant().is_suspended
        await press("new key of acme")
        assert len(tenant().keys) == 2
        await tab.until(
            f"Boolean(document.querySelector('[aria-label=\"revoke {key.id}\"]'))"
        )
        await press(f"revoke {key.id}")
        assert key.id not in {each.id for each in tenant().keys}
        assert tab.errors == []


async def numbers(tab: Tab, title: str) -> str:
    """Return a headline number."""
    found = "[...document.querySelectorAll('.numbers div')]"
    one = f"{found}.find(d => d.firstChild.innerText === {title!r})"
    return str(await tab.value(f"{one}.lastChild.innerText"))


async def test_stage_is_scaled_from_the_page(service: Served, page: str) -> None:
    async with opened(page) as tab:
        await tab.until("document.querySelectorAll('.replica.ready').length === 4")
        await tab.value(
            "document.querySelector('[aria-label^=\"one replica more\"]').click()"
        )
        await tab.until_text("Run 2 replicas of m/front?")
        await tab.click("Do it", "dialog")
        await tab.until("document.querySelectorAll('.replica.ready').length === 5")
        service.scale("front", 1)
        await tab.until("document.querySelectorAll('.replica.ready').length === 4")
        assert tab.errors == []


async def test_replica_is_looked_at_by_keyboard(service: Served, page: str) -> None:
    async with opened(page) as tab:
        await tab.until("document.querySelectorAll('.replica.ready').length === 4")
        await tab.value("document.querySelector('.replica').focus()")
        for kind in ("keyDown", "keyUp"):
            key = {"key": "Enter", "code": "Enter", "windowsVirtualKeyCode": 13}
            more = {"text": "\r"} if kind == "keyDown" else {}
            await tab.ask("Input.dispatchKeyEvent", type=kind, **key, **more)
        await tab.until("Boolean(document.querySelector('dialog[open] dl.facts'))")
        await tab.until("document.querySelector('dialog pre').innerText.length > 0")
        for kind in ("keyDown", "keyUp"):
            key = {"key": "Escape", "code": "Escape", "windowsVirtualKeyCode": 27}
            await tab.ask("Input.dispatchKeyEvent", type=kind, **key)
        await tab.until("!document.querySelector('dialog')")
        assert tab.errors == []


async def test_chat_answers(service: Served, page: str) -> None:
    async with opened(page) as tab:
        await tab.until_text("Chat")
        await tab.click("Send")
        await tab.until("document.querySelector('.said').innerText.length > 20")
        await tab.until("document.querySelector('.form button').innerText === 'Send'")
        said = await tab.value("document.querySelector('.said').innerText")
        assert tab.errors == [], said
        await tab.value(
            "[...document.querySelectorAll('.events td')].length > 3 && "
            "(s => { s.value = 'ready'; s.dispatchEvent(new Event('change', "
            "{bubbles: true})) })(document.querySelector('section h2 select'))"
        )
        kinds = "[...document.querySelectorAll('.events td:nth-child(2)')]"
        await tab.until(f"{kinds}.every(d => d.innerText === 'ready')")


@pytest.mark.parametrize("width", [380, 1280])
async def test_page_fits(page: str, width: int) -> None:
    async with opened(page) as tab:
        await tab.until_text("✓ ready")
        assert len(await tab.picture(width, 1400)) > 10_000
        assert await tab.value("document.documentElement.scrollWidth") <= width


@pytest.mark.parametrize("bytes_s", [-1, 50_000, 15_000])
async def test_large_service_is_shown_and_followed(bytes_s: int) -> None:
    """200 replicas, 500 streams, and every number changes each second."""
    app = make_dashboard(cast("Service", LargeService()))
    server = PageServer(app, "127.0.0.1", 0)
    sock = server.bind()
    serving = asyncio.ensure_future(server.serve(sockets=[sock]))
    while not server.started:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    port = sock.getsockname()[1]
    try:
        async with opened(f"http://127.0.0.1:{port}/", bytes_s) as tab:
            await tab.until("document.querySelectorAll('.replica').length === 200")
            await tab.until_text("500 shown")
            await tab.until("document.querySelectorAll('.flows path').length === 40")
            before = await numbers(tab, "tokens")
            await tab.until("!document.body.innerText.includes(" + repr(before) + ")")
            assert len(await tab.picture(1280, 1400)) > 10_000
            assert await tab.value("document.documentElement.scrollWidth") <= 1280
            assert tab.errors == []
    finally:
        server.should_exit = server.force_exit = True
        await serving


async def test_end_of_the_service_is_said(tmp_path: Path) -> None:
    """The page stays, and says that nobody answers."""
    spec = spec_of(save_decoder(tmp_path / "decoder"))
    with served(tmp_path, spec) as service, shown(service) as address:
        async with opened(address) as tab:
            await tab.until_text("✓ ready")
            await asyncio.to_thread(service.end)
            await tab.until_text("no controller answers")
            await tab.until_text("? as of")
