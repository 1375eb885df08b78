"""Whether the data of a run are those of its checkpoint, source by source, and where each source goes on.

A source is known by the fingerprint of its content; its name may change. The rest of the state is in `loader.py`.
"""

import logging
from collections.abc import Mapping
from typing import Any

from torchtitan_dmuon.data.dataset import PackedDataset
from torchtitan_dmuon.data.errors import DataError

logger = logging.getLogger(__name__)

BEGIN_ANEW = 'begin the data anew with checkpoint.exclude_from_loading = ["dataloader"]'


def describe(samples: int, data: PackedDataset) -> dict[str, Any]:
    """What a checkpoint stores of a source of which `samples` were read."""
    return {
        "samples": samples,
        "epoch_samples": len(data),
        "seq_len": data.seq_len,
        "tokens": len(data.tokens),
        "fingerprint": data.fingerprint,
    }


def resume_sources(
    saved: Mapping[str, dict[str, Any]], sources: Mapping[str, PackedDataset], accept_changes: bool
) -> list[int]:
    """Samples read of each of `sources`, from what a checkpoint stores by name of source.

    A source that the checkpoint lacks begins at 0. With another `seq_len`, or changed data that are accepted, a source
    goes on at the same share of the same epoch.

    Raises:
        DataError: the content of a source changed, or a source is not read any more, and `accept_changes` is False.
    """
    before = _match(saved, sources)
    gone = [name for name in saved if name not in before.values()]
    changes = [f"the source {name!r} of the checkpoint is not in this run" for name in gone]
    for name, old_name in before.items():
        old, data = saved[old_name], sources[name]
        if old["fingerprint"] != data.fingerprint:
            changes.append(
                f"the content of {name!r} is not that of the checkpoint (then {old['tokens']} tokens with fingerprint "
                f"{old['fingerprint']}, now {len(data.tokens)} with {data.fingerprint})"
            )
    if changes and not accept_changes:
        raise DataError(
            f"{'; '.join(changes)}: use the same data, tokenizer and keys of the data; or accept the change from here "
            f"on with training.accept_changed_data = true; or {BEGIN_ANEW}. New files can be a source of their own"
        )
    for change in changes:
        logger.warning("training.accept_changed_data: %s", change)
    return [
        _goes_on(name, saved[before[name]], data) if name in before else _begins(name, data, saved)
        for name, data in sources.items()
    ]


def _match(saved: Mapping[str, dict[str, Any]], sources: Mapping[str, PackedDataset]) -> dict[str, str]:
    """The name that a source has in the checkpoint, by its name now: of the same content, else of the same name."""
    found: dict[str, str] = {}

    def pair(name: str, old_name: str) -> None:
        if name not in found and old_name not in found.values():
            found[name] = old_name

    # Two sources of one content are told apart by their names.
    for same_name, same_content in ((True, True), (False, True), (True, False)):
        for name, data in sources.items():
            for old_name, old in saved.items():
                content = old["fingerprint"] == data.fingerprint
                if (name == old_name or not same_name) and (content or not same_content):
                    pair(name, old_name)
    return found


def _begins(name: str, data: PackedDataset, saved: Mapping[str, dict[str, Any]]) -> int:
    logger.info("%s: a new source of %d tokens beside %s", name, len(data.tokens), ", ".join(saved))
    return 0


def _goes_on(name: str, old: dict[str, Any], data: PackedDataset) -> int:
    """The number of samples read, in samples of today's length."""
    if old["epoch_samples"] == len(data) and old["seq_len"] == data.seq_len:
        return old["samples"]
    epochs, rest = divmod(old["samples"], old["epoch_samples"])
    samples = epochs * len(data) + -(-rest * len(data) // old["epoch_samples"])
    logger.info(
        "%s: %d samples of %d tokens were read; goes on at the same share of its epoch, after %d samples of %d",
        *(name, old["samples"], old["seq_len"], samples, data.seq_len),
    )
    return samples
