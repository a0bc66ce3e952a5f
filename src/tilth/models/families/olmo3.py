"""OLMo 3: OLMo 2 with a sliding window in three of four layers, where rotary embedding is not scaled."""

from dataclasses import replace

from tilth.models.families import olmo2

FAMILY = replace(
    olmo2.FAMILY,
    architecture="Olmo3ForCausalLM",
    defaults={**olmo2.FAMILY.defaults, "rope_theta": 500000.0, "sliding_window": 4096},
    windows="alternate",
    period=4,
    window_theta="rope_theta",
)
