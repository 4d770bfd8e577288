"""What a person reads in a terminal: decisions, outcomes and clusters, at 80 columns or wider."""

from heterps.report.changes import diff_report, what_if_report
from heterps.report.checkpoints import checkpoints_table
from heterps.report.cluster import decisions_table, jobs_table, nodes_table, roles_table
from heterps.report.decision import (
    alternatives_table,
    decision_report,
    pareto_table,
    plan_table,
    probabilities_table,
)
from heterps.report.forecast import forecast_report
from heterps.report.outcome import (
    job_commands,
    job_report,
    measured_report,
    outcome_report,
)
from heterps.report.terminal import console, next_commands, show

__all__ = [
    "alternatives_table",
    "checkpoints_table",
    "console",
    "decision_report",
    "decisions_table",
    "diff_report",
    "forecast_report",
    "job_commands",
    "job_report",
    "jobs_table",
    "measured_report",
    "next_commands",
    "nodes_table",
    "outcome_report",
    "pareto_table",
    "plan_table",
    "probabilities_table",
    "roles_table",
    "show",
    "what_if_report",
]
