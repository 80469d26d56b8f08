"""Before the ranks of a round start, copy the snapshot files between its nodes, so that every node has all of them."""

from __future__ import annotations

from pathlib import Path

from nodekit.deploy.agent import descriptors
from nodekit.deploy.agent.rendezvous.formed import Formed
from nodekit.deploy.agent.replicas.replicas import Replicas
from nodekit.deploy.agent.unfit import Unfit, Unreached


def share_snapshots(replicas: Replicas | None, folder: Path, formed: Formed, generation: int) -> None:
    """Get all files that workers of any member wrote to their snapshot folders; call it before any worker starts.

    Args:
        replicas: this node's; None if it exchanges no files.
        folder: where this node's workers write.
        formed: the round.
        generation: of the round.

    Raises:
        Unreached: a member that holds a missing file has become unreachable.
        Unfit: files cannot be read or written on this node.
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
    # Ranks that lack a file which others have would start from another step, and overwrite newer snapshots.
    if text:
        cure = f"mend or make room on the disk of {folder}"
        raise kind(f"{text}: no rank is started here until it can", cure=cure)
