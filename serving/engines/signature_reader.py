"""The best signature there is of a request: live from its prefill, else predicted."""

from __future__ import annotations

import logging

from serving.core.errors import InvalidRequest
from serving.core.request import Request
from serving.core.signature import Signature
from serving.signatures.artefact import SignatureArtefact
from serving.signatures.wire import decode_signature

_log = logging.getLogger(__name__)


class SignatureReader:
    """Reads what engines send and predicts where they send nothing.

    Attributes:
        num_ignored: signatures that engines sent and that broke a rule.
    """

    def __init__(self, artefact: SignatureArtefact | None) -> None:
        self._artefact = artefact
        self.num_ignored = 0

    def best(self, sent: object, request: Request) -> Signature | None:
        """The live signature of a prefill answer; a prediction when there is none to trust.

        Args:
            sent: the answer's `eldr_sig` member, None when it had none.
            request: the prompt it must belong to.
        """
        if sent is None or self._artefact is None:
            return self.predicted(request)
        try:
            return decode_signature(
                sent, model=self._artefact.model, num_prompt_tokens=request.num_prompt_tokens
            )
        except InvalidRequest as error:
            # The engine's fault, not the request's: place it by what else is known.
            self.num_ignored += 1
            _log.warning("request %s: signature ignored: %s", request.request_id, error)
            return self.predicted(request)

    def predicted(self, request: Request) -> Signature | None:
        """The token table's guess; None without a table."""
        if self._artefact is None or self._artefact.token_table is None:
            return None
        return self._artefact.token_table.predict(request.token_ids, self._artefact.model)
