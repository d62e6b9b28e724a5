"""Export a finished run to a HuggingFace folder (`export_hf`), with all ranks in parallel.

Each rank reads and writes layers of its own stage, in its own files: no weights are sent between ranks, and none holds
more than one layer on top of its share. The replicas of a stage divide its layers; in a ZeRO run every rank is a
replica. The hosts share `save_path`. Rank 0 creates the folder under a temporary name, adds index, config and tokenizer
when all ranks are done, and renames it last.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import torch

from models.checkpoint.layout import ADAPTER
from models.checkpoint.publish import publish_folder, try_publishing, writing
from models.conversion.to_huggingface import Export, ExportOptions, pp_to_hg
from training.callbacks import Callback, JobView
from training.distributed.processes import agreed, gather
from training.option import add_to_export, options_of

EXPORTED = "hf"  # in the run's folder


def export_run(
    checkpoint: Path,
    target: Path,
    layers: Sequence[int],
    model_folder: Path,
    add_files: Callable[[Path, Path], None],
) -> None:
    """Write the HuggingFace folder of a checkpoint, for peft where it is an adapter; all ranks call it together.

    Args:
        target: folder to write; an existing one stays until the new one is complete.
        layers: numbers of this rank's stage's layers.
        model_folder: the folder that the run started from, which is never replaced.
        add_files: called on rank 0 with checkpoint and new folder, when everything else is written.

    Raises:
        RunRefused: on every rank, if some rank cannot read a layer or write; nothing was changed.
    """
    rank, options = torch.distributed.get_rank(), ExportOptions(add_card=add_files)
    if (checkpoint / ADAPTER).is_file():  # megabytes, which one rank writes
        with agreed(), writing(target):
            if rank == 0:
                pp_to_hg(checkpoint, target, overwrite=True, options=options)
        return

    # Each rank writes its layers into the one folder, which is published once all are there.
    writers = layers_by_rank(gather(layers))
    with ExitStack() as publishing:
        partial = None
        with agreed():
            export = Export(checkpoint, options, writers)
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


class ExportHF(Callback):
    """Write the folder when the run is finished; options may add files to it."""

    def on_build(self, job: JobView) -> None:
        with agreed():
            if job.process.rank == 0 and job.model_folder:  # fail now, not after days of training
                try_publishing(job.save_path / EXPORTED, [job.model_folder])

    def on_finish(self, job: JobView, checkpoint: Path) -> None:
        assert job.model_folder is not None
        target = job.save_path / EXPORTED
        add_files = partial(add_to_export, options_of(job.config))
        export_run(checkpoint, target, job.layers, job.model_folder, add_files)
        job.log.print(f"exported: {target}")


def layers_by_rank(held: Sequence[Sequence[int]]) -> list[Sequence[int]]:
    """Divide each stage's layers among its replicas; `held` has the layers of each rank's stage."""
    shares = []
    for rank, layers in enumerate(held):
        replica, replicas = held[:rank].count(layers), held.count(layers)
        begin, end = (len(layers) * each // replicas for each in (replica, replica + 1))
        shares.append(layers[begin:end])
    return shares
