// SPDX-License-Identifier: Apache-2.0

// Package alerts tests the alerts of charts/semmoe-operator/files/alerts.yaml and the dashboard in the same directory
// with the engine of Prometheus. The tests use given series, metrics scraped from real processes, and, with -args
// -demo, metrics scraped from the demo. The package is a separate Go module, so that the operator's module does not
// depend on Prometheus.
package alerts
