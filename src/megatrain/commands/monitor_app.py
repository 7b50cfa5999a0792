"""The monitor as a textual application. Imported only where textual is installed."""

from __future__ import annotations

from typing import ClassVar

from textual.app import App, ComposeResult
from textual.binding import BindingType
from textual.containers import VerticalScroll
from textual.widgets import Footer, Static

from megatrain.commands.monitor import Watcher, render


class MonitorApp(App[None]):
    """One view, drawn again every few seconds."""

    BINDINGS: ClassVar[list[BindingType]] = [("q", "quit", "leave"), ("r", "look", "look now")]

    def __init__(self, watcher: Watcher, every_s: float):
        super().__init__()
        self.title = watcher.files.path.name
        self._watcher, self._every_s = watcher, every_s
        self.view = Static()

    def compose(self) -> ComposeResult:
        yield VerticalScroll(self.view)
        yield Footer()

    def on_mount(self) -> None:
        self.action_look()
        self.set_interval(self._every_s, self.action_look)

    def action_look(self) -> None:
        self.view.update(render(self._watcher.look(), self.size.width - 4))
