"""Studies, simulators and drills: commands beside a run, which the installation brings too.

tilth guard replay        guard_replay, dual_phase: a step of a stored run again, on groups of its workers
tilth guard inject        drill, strike: a fault happens to a worker
tilth guard simulate      guard_simulate, survival, faults: training time under a trace of faults
tilth layout RECIPE       published_steps, with --check-against published: step times of other systems
tilth simulate rollout    simulate_rollout, asynchrony: synchronous and asynchronous rollouts
tilth trace whatif FILE   trace_whatif, whatif, cause, dependencies, straggler_format: traces of the straggler study
tilth trace whatif RUN    trace_whatif: stragglers of a run; other_network, with --latency or --bandwidth

Not behind a command: pipeline_idle, the idle time of schedules of a pipeline; odd_machine_fit, rules for odd machines.
"""
