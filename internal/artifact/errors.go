// SPDX-License-Identifier: Apache-2.0

package artifact

import "errors"

// Errors of the client's methods, for errors.Is.
var (
	// ErrNotFound reports that the artifact does not exist, or that the scope has no result.
	ErrNotFound = errors.New("not found")
	// ErrConflict reports that the artifact was not deleted, because it is being stored or was stored again.
	ErrConflict = errors.New("conflict")
	// ErrUnauthenticated reports that the token does not belong to a running pod, or has a different audience.
	ErrUnauthenticated = errors.New("unauthenticated")
	// ErrForbidden reports that the pod is not allowed to access the scope.
	ErrForbidden = errors.New("forbidden")
	// errTooLarge reports an artifact above the size limit of the store.
	errTooLarge = errors.New("too large")
	// ErrFull reports that the store has no space for the artifact.
	ErrFull = errors.New("the store is full")
	// ErrInterrupted reports a connection that failed while the store sent an artifact. The request can be retried.
	ErrInterrupted = errors.New("the connection to the store failed during the response")
)

// sentinels maps HTTP statuses of the protocol to errors.
var sentinels = map[int]error{
	404: ErrNotFound,
	409: ErrConflict,
	401: ErrUnauthenticated,
	403: ErrForbidden,
	413: errTooLarge,
	422: ErrCorrupt,
	507: ErrFull,
}

// StatusError is an error response of the store.
type StatusError struct {
	// Code is the HTTP status.
	Code int
	// Message describes the error.
	Message string
}

func (e *StatusError) Error() string { return "artifact store: " + e.Message }

// Is reports whether target is the error of the HTTP status.
func (e *StatusError) Is(target error) bool {
	sentinel, ok := sentinels[e.Code]
	return ok && sentinel == target
}
