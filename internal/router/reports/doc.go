// SPDX-License-Identifier: Apache-2.0

// Package reports exports the observations of a request router as metrics.
package reports
