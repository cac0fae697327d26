// Package alerts tests the alerts of charts/semmoe-operator/files/alerts.yaml and the dashboard beside them with the engine of Prometheus,
// which a module of its own keeps from the operator's: on series at the rules' own durations, on what a Prometheus scrapes from real
// processes, and, with -args -demo, on what it scrapes from the demo.
package alerts
