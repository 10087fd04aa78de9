"""PlainConversation: a prompt without a chat template, for `raw` of /api/generate and models without a template."""

from __future__ import annotations

from slipstream.serve.http.chat.conversation import ChatConversation


class PlainConversation(ChatConversation, kw_only=True):
    """The content of its only message is the whole prompt."""

    def render(self) -> str:
        (message,) = self.messages
        text: str = message["content"]
        return text
