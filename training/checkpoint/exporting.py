"""The HuggingFace folder at the end of a run (`export_hf`), written by all ranks side by side.

Each rank reads and writes layers of its own stage, in files of its own: no weights travel between ranks, and none holds
more than one layer on top of its share. The replicas of a stage divide its layers; in a ZeRO run every rank is one. The
hosts share `save_path`. Rank 0 makes the folder under a temporary name, adds index, config and tokenizer when everybody
is done, and renames it last.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

import torch

from models.checkpoint.publish import publish_folder, writing
from models.conversion.to_huggingface import Export, ExportOptions
from training.distributed.processes import agreed, gather

EXPORTED = "hf"  # in the run's folder


def export_run(
    checkpoint: Path,
    target: Path,
    layers: Sequence[int],
    model_folder: Path,
    add_card: Callable[[Path, Path], None] | None = None,
) -> None:
    """Write the HuggingFace folder of a checkpoint; all ranks call it together.

    Args:
        target: the folder to be; one that is there already stays until the new one is whole.
        layers: those that this rank's stage holds.
        model_folder: the folder that the run started from, which is never replaced.
        add_card: called with checkpoint and folder to be on rank 0, when everything else is there.

    Raises:
        RunRefused: on every rank, where some rank cannot read a layer or write; nothing was changed.
    """
    rank = torch.distributed.get_rank()
    writers = layers_by_rank(gather(layers))
    with ExitStack() as publishing:
        partial = None
        with agreed():
            export = Export(checkpoint, ExportOptions(add_card=add_card), writers)
            if rank == 0:
                partial = publishing.enter_context(publish_folder(target, True, [checkpoint, model_folder]))
        shared = gather(partial)[0]
        assert shared is not None
        with agreed(), writing(target):
            export.write_weights(shared, rank)
        with agreed(), writing(target):
            if rank == 0:
                export.write_side_files(shared)
                publishing.close()


def layers_by_rank(held: Sequence[Sequence[int]]) -> list[Sequence[int]]:
    """Each rank's share of the layers that its stage holds (`held`, by rank): the replicas of a stage divide them."""
    shares = []
    for rank, layers in enumerate(held):
        replica, replicas = held[:rank].count(layers), held.count(layers)
        begin, end = (len(layers) * each // replicas for each in (replica, replica + 1))
        shares.append(layers[begin:end])
    return shares
