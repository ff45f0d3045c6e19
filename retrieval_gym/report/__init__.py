"""One self-contained HTML page about finished runs: ``data.collect`` gathers it, ``page.render`` lays it out."""
