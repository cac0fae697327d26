// Package reports makes metrics of what a request router reports of its requests.
package reports
