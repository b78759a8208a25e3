"""Report: the views of a run for a person, during the run and after it.

During a run, `progress` reduces telemetry to one state, `live` draws that state on a terminal, `console_lines` writes
it as plain lines, and `run_display` is the supervisor's interface to the three. After a run, `run_data` reads the run
folder; `charts`, `diagram` and `tables` make parts of a page from it, with the drawing functions of `svg`;
`timeline_data` and `timeline_picture` show which role waited for which other role; and `page` joins the parts into one
self-contained `report.html`. `samples` shows single answers. `comparison` reads several runs, and `comparing` measures
them beyond accuracy.

Every part copes with missing data: a policy without metrics, a gap, a single point, a value that is not finite.
"""
