"""What each page shows."""

from collections.abc import AsyncIterator
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import HTMLResponse, RedirectResponse, Response, StreamingResponse
from starlette.concurrency import run_in_threadpool

from heterps.client.records import Job
from heterps.console.guard import from_here
from heterps.console.pages.history import History
from heterps.console.pages.job import job_sections
from heterps.console.pages.jobs import PAGE, jobs_table
from heterps.console.pages.logs import latest_logs, log_events
from heterps.console.pages.nodes import node_sections
from heterps.console.pages.parts import ago, progress, state_chip
from heterps.console.pages.what_if import OFFERED, WhatIf, compared, headline, plan_anew
from heterps.console.site import Console
from heterps.console.visitor import Visitor
from heterps.errors import HeterpsError
from heterps.html.markup import join
from heterps.html.palette import Palette
from heterps.page.document import sections
from heterps.page.summary import overview
from heterps.view.changes import is_whole
from heterps.view.decision import types_of
from scheduler.problem.fields import InputError

_MOST_FOLLOWERS = 16


def visitor_of(request: Request) -> Visitor:
    """Who asks, as the guard has found."""
    visitor: Visitor = request.state.visitor
    return visitor


def add(app: FastAPI, console: Console) -> None:
    """Register the pages."""
    _jobs(app, console)
    _job(app, console)
    _logs(app, console)
    _plans(app, console)
    _nodes(app, console)


def _jobs(app: FastAPI, console: Console) -> None:
    @app.get("/")
    def jobs(request: Request, before: str = "") -> HTMLResponse:
        visitor = visitor_of(request)
        page = visitor.client.jobs_page(PAGE, before)
        shown = page.jobs[::-1]
        decisions = visitor.decisions.figures(PAGE, before) if shown else {}
        return console.page(
            request,
            "jobs.html",
            table=jobs_table(shown, decisions) if shown else None,
            count=page.total,
            busy=page.total_unended,
            newer=bool(before),
            older=page.next,
        )

    @app.get("/jobs/{job_id}/cancel")
    def asked(request: Request, job_id: str) -> Response:
        job = visitor_of(request).client.status(job_id)
        if job.state.is_final:
            return RedirectResponse(f"/jobs/{job.job_id}", 303)
        return console.page(request, "cancel.html", job=job)

    @app.post("/jobs/{job_id}/cancel")
    async def cancel(request: Request, job_id: str) -> Response:
        if await console.form(request) is None:
            return console.problem(request, 403, "Refused", "The form is not one of ours.")
        job = await run_in_threadpool(visitor_of(request).client.cancel, job_id)
        return RedirectResponse(f"/jobs/{job.job_id}", 303)


def _job(app: FastAPI, console: Console) -> None:
    @app.get("/jobs/{job_id}")
    def job_page(request: Request, job_id: str) -> HTMLResponse:
        visitor = visitor_of(request)
        job = visitor.client.status(job_id)
        decision = visitor.decisions.decision(job)
        history = History.of(visitor.client.history(job_id))
        seen = console.traffic.of(job_id)
        parts = join(*job_sections(job, decision, history, seen))
        return _of_job(console, request, job, "progress", "job.html", parts=parts)

    @app.get("/jobs/{job_id}/decision")
    def decision_page(request: Request, job_id: str) -> HTMLResponse:
        visitor = visitor_of(request)
        job = visitor.client.status(job_id)
        decision = visitor.decisions.decision(job, curve=True)
        parts = None
        if decision is not None:
            history = History.of(visitor.client.history(job_id))
            run = history.measured_so_far(decision, job)
            palette = Palette(types_of(run))
            parts = join(overview(run, palette), *sections(run, palette))
        return _of_job(console, request, job, "decision", "decision.html", parts=parts)


def _logs(app: FastAPI, console: Console) -> None:
    following = [0]

    @app.get("/jobs/{job_id}/logs")
    def logs(request: Request, job_id: str) -> HTMLResponse:
        client = visitor_of(request).client
        job = client.status(job_id)
        texts = latest_logs(client, job_id)
        return _of_job(console, request, job, "logs", "logs.html", texts=texts)

    @app.get("/jobs/{job_id}/logs/stream")
    async def stream(request: Request, job_id: str) -> Response:
        if following[0] >= _MOST_FOLLOWERS:
            return Response("too many follow logs here; try again later\n", 503)
        visitor = visitor_of(request)
        await run_in_threadpool(visitor.client.status, job_id)

        async def body() -> AsyncIterator[str]:
            following[0] += 1
            try:
                async for event in log_events(visitor.connect, job_id):
                    yield event
            finally:
                following[0] -= 1

        return StreamingResponse(body(), media_type="text/event-stream")


def _plans(app: FastAPI, console: Console) -> None:
    @app.get("/what-if")
    def latest(request: Request) -> Response:
        planned = visitor_of(request).decisions.figures(PAGE)
        if not planned:
            text = "A plan is made for a job; submit one with `heterps submit JOB.yaml`."
            return console.page(request, "problem.html", title="Nothing is planned yet", text=text)
        return RedirectResponse(f"/jobs/{list(planned)[-1]}/what-if", 303)

    @app.get("/jobs/{job_id}/what-if")
    def what_if(request: Request, job_id: str) -> HTMLResponse:
        visitor = visitor_of(request)
        job = visitor.client.status(job_id)
        decision = visitor.decisions.decision(job)
        if decision is None or not is_whole(decision):
            text = f"Job {job_id} has no decision that could be made again."
            return console.problem(request, 404, "Nothing is planned yet", text)
        query = request.query_params
        form = {key: query.getlist(key) for key in query}
        asked = WhatIf.of(form, decision)
        answer, problem = None, ""
        if asked.sent and from_here(request):  # planning takes time: not for another site's link
            try:
                after = plan_anew(visitor.client, decision, asked)
                answer = compared(decision, after)
            except (InputError, HeterpsError) as error:
                problem = str(error)
        return _of_job(
            console,
            request,
            job,
            "what-if",
            "whatif.html",
            decision=decision,
            headline=headline(decision),
            asked=asked,
            methods=OFFERED,
            answer=answer,
            problem=problem,
        )


def _nodes(app: FastAPI, console: Console) -> None:
    @app.get("/nodes")
    def nodes(request: Request) -> HTMLResponse:
        visitor = visitor_of(request)
        found = visitor.client.nodes()
        offer, name = None, ""
        for job in visitor.client.jobs(PAGE)[::-1]:
            decision = visitor.decisions.decision(job)
            if decision is not None and decision.resources is not None:
                offer, name = decision.resources, job.name
                break
        parts = join(*node_sections(found, offer, name))
        return console.page(request, "nodes.html", parts=parts)


def _of_job(
    console: Console, request: Request, job: Job, tab: str, name: str, **values: Any
) -> HTMLResponse:
    """A page of one job, under its head."""
    return console.page(
        request,
        name,
        done=job.state.is_final,
        job=job,
        tab=tab,
        chip=state_chip(job.state),
        bar=progress(job),
        age=ago(job.submitted_at),
        may_cancel=not job.state.is_final and visitor_of(request).may_cancel,
        **values,
    )
