"""The web console: jobs as they run, decisions, nodes and prices, what-if; in a browser.

A process of its own that speaks to the scheduler as any client does. Pages are made on this side
and hold no script of their own; the one script that is served only keeps them fresh.
"""
