"""Run a pipeline somewhere else: in threads or worker processes, with the output of the serial run.

`loader` holds what a user sees, `plan` divides a pipeline, `schedule` deals tasks to any pool and puts the results in
order; `threads` and `processes` are the pools. For processes: `launch` starts them, `worker` is what they run,
`shipment` carries the pipeline there, `arena` and `wire` carry results back.
"""
