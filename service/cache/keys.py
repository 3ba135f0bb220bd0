"""The key of an answer: everything it depends on, and nothing that it doesn't."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import orjson

# Of `hivlp.models.runtime`'s picture and text preparation, and of the answer's own form.
PREPROCESSING_VERSION = 1
ANSWER_VERSION = 1


def answer_key(
    *,
    query_encoder: str,
    index: str,
    version: str,
    kind: str,
    content: bytes,
    reranker: str | None = None,
    parameters: Mapping[str, Any],
) -> str:
    """sha256 (64 hex digits) over encoder, snapshot, preprocessing, parameters and input.

    `reranker` is the identity of the one that sorted the answer, None where none did.
    """
    parts = {
        "answer": ANSWER_VERSION,
        "preprocessing": PREPROCESSING_VERSION,
        "query_encoder": query_encoder,
        "index": index,
        "version": version,
        "kind": kind,
        "reranker": reranker,
        "content": hashlib.sha256(content).hexdigest(),
        "parameters": parameters,
    }
    return hashlib.sha256(orjson.dumps(parts, option=orjson.OPT_SORT_KEYS)).hexdigest()
