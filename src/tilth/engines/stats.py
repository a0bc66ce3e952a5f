"""Counters of an engine."""

from dataclasses import asdict, dataclass


@dataclass
class Stats:
    """Counts since the engine was made or ``reset`` was called."""

    steps: int = 0
    prefilled_tokens: int = 0
    """Prompt tokens whose KV was computed."""
    cached_tokens: int = 0
    """Prompt tokens whose KV came from the prefix store."""
    shared_tokens: int = 0
    """Prompt tokens that further samples of a prompt did not have to compute."""
    decoded_tokens: int = 0
    """Tokens sampled, the first of each completion included."""
    decode_passes: int = 0
    decode_rows: int = 0
    """Rows computed by decode passes, holes and padding included."""
    useful_rows: int = 0
    """Of these, rows whose token a sequence took."""
    drafted_tokens: int = 0
    """Tokens of drafts that decode passes computed."""
    accepted_tokens: int = 0
    """Of these, tokens that their sequence said."""
    undrafted_passes: int = 0
    """Decode passes without drafts, since those of a drafter apart came late, or it was lost."""
    lost_drafters: int = 0
    """Processes of drafters apart that died, or stayed silent."""
    ahead_tokens: int = 0
    """Tokens that run-ahead said, of which no completion is made."""
    undrafted_rows: int = 0
    """Rows of sequences that have no drafts, since what they may say depends on each token before it: those with a
    schema or changed logits."""
    kv_looks: int = 0
    """Passes after which the KV cache was looked at."""
    kv_used: float = 0.0
    """Share of its blocks in use, summed over them."""
    kv_peak: float = 0.0
    """The greatest share, since somebody set it to 0."""
    preemptions: int = 0
    moved_rows: int = 0
    """Rows that went to a larger lane."""
    finished: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    """The model in decode passes."""
    sample_seconds: float = 0.0
    """Choosing and writing down their tokens."""
    place_seconds: float = 0.0
    """First tokens and copies of prompts to their samples."""
    compile_seconds: float = 0.0
    """Compiling, since the engine was made."""

    def decoded(self, rows: int, tokens: int, decode_seconds: float, sample_seconds: float) -> None:
        """Count a decode pass."""
        self.decode_passes += 1
        self.decode_rows += rows
        self.useful_rows += tokens
        self.decoded_tokens += tokens
        self.decode_seconds += decode_seconds
        self.sample_seconds += sample_seconds

    def held(self, share: float) -> None:
        """Count the share of KV blocks that are in use after a pass."""
        self.kv_looks += 1
        self.kv_used += share
        self.kv_peak = max(self.kv_peak, share)

    def drafted(self, tokens: int, accepted: int) -> None:
        """Count the drafts of a decode pass."""
        self.drafted_tokens += tokens
        self.accepted_tokens += accepted

    @property
    def occupancy(self) -> float:
        """Share of decoded rows that were useful."""
        return self.useful_rows / self.decode_rows if self.decode_rows else 1.0

    @property
    def acceptance(self) -> float:
        """Share of drafted tokens that were accepted; 0 without drafts."""
        return self.accepted_tokens / self.drafted_tokens if self.drafted_tokens else 0.0

    @property
    def passes_per_token(self) -> float:
        """Passes that a sequence took part in, for each token that it drew in them."""
        return 1 - self.accepted_tokens / self.useful_rows if self.useful_rows else 1.0

    def dump(self) -> dict[str, float]:
        """All of them by name."""
        derived = {name: getattr(self, name) for name in ("occupancy", "acceptance", "passes_per_token")}
        return {**asdict(self), **derived}
