// Package reports exports the observations of a request router as metrics.
package reports
