// SPDX-License-Identifier: Apache-2.0

// Package traffic reads what is known about the traffic of a MoEDeployment: the reports of request routers, a
// Prometheus series, and the calibration of a plan. Package locality evaluates it.
package traffic
