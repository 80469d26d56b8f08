"""Before a round's ranks start: its nodes give each other what ranks have saved, so that each has all of it."""

from __future__ import annotations

from pathlib import Path

from nodekit.deploy.agent import descriptors
from nodekit.deploy.agent.rendezvous.formed import Formed
from nodekit.deploy.agent.replicas.replicas import Replicas
from nodekit.deploy.agent.unfit import Unfit, Unreached


def share_snapshots(replicas: Replicas | None, folder: Path, formed: Formed, generation: int) -> None:
    """Have what the workers of any member wrote to their folders, before any is started.

    Args:
        replicas: this node's; None where it keeps none.
        folder: of what its workers write.
        formed: the round.
        generation: whose round it is.

    Raises:
        Unreached: who has it cannot be reached any more.
        Unfit: this node cannot have it.
    """
    peers = {each["name"]: each["replicas"] for each in formed.members if each["replicas"]}
    if replicas is None or len(peers) < len(formed.members):
        return
    attempt = (generation, formed.round)
    if not any(each["has_files"] for each in formed.members):
        replicas.enter(peers, attempt)
        return
    kind, text = Unfit, ""
    try:
        gathered = replicas.gather(peers, attempt)
        if gathered.missing:
            text = f"{', '.join(gathered.missing)} could not be written to {folder}"
            if gathered.gone:
                kind = Unreached
                whys = ", ".join(f"{node} ({gathered.silent[node]})" for node in gathered.gone)
                text += f", or not be fetched from {whys}"
    except OSError as error:
        if descriptors.are_used_up(error):
            raise
        text = f"what the ranks saved cannot be read or set aside ({error.strerror or error})"
    # Ranks without a file that others have would begin at another step, and save over what there is.
    if text:
        cure = f"mend or make room on the disk of {folder}"
        raise kind(f"{text}: no rank is started here until it can", cure=cure)
