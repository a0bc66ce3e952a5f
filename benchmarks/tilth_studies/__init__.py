"""Studies, simulators and drills: commands beside a run, which the installation brings too."""
