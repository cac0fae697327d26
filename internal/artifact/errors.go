package artifact

import (
	"errors"
	"net/http"
)

// Errors of the client's methods, for errors.Is.
var (
	// ErrNotFound: there is no such artifact, or the scope has no result.
	ErrNotFound = errors.New("not found")
	// ErrConflict: the artifact is being stored, or was stored again, so that it was not deleted.
	ErrConflict = errors.New("conflict")
	// ErrUnauthenticated: the token is not one of a living pod for this audience.
	ErrUnauthenticated = errors.New("unauthenticated")
	// ErrForbidden: the scope is not one that this pod may read or write.
	ErrForbidden = errors.New("forbidden")
	// ErrTooLarge: the artifact exceeds the store's limit.
	ErrTooLarge = errors.New("too large")
	// ErrFull: the store has no space for the artifact.
	ErrFull = errors.New("the store is full")
	// ErrInterrupted: the store went away while it sent an artifact. It may be asked for it anew.
	ErrInterrupted = errors.New("the store went away while it answered")
)

// sentinels maps the statuses of the protocol to the errors that they mean.
var sentinels = map[int]error{
	http.StatusNotFound:              ErrNotFound,
	http.StatusConflict:              ErrConflict,
	http.StatusUnauthorized:          ErrUnauthenticated,
	http.StatusForbidden:             ErrForbidden,
	http.StatusRequestEntityTooLarge: ErrTooLarge,
	http.StatusUnprocessableEntity:   ErrCorrupt,
	http.StatusInsufficientStorage:   ErrFull,
}

// StatusError is the store's refusal.
type StatusError struct {
	// Code is the HTTP status.
	Code int
	// Message says what is wrong.
	Message string
}

func (e *StatusError) Error() string { return "artifact store: " + e.Message }

// Is reports whether target is the error that the status means.
func (e *StatusError) Is(target error) bool {
	sentinel, ok := sentinels[e.Code]
	return ok && sentinel == target
}

// temporary tells whether the same request can succeed later without any change. A full store is not: somebody has to
// enlarge it.
func (e *StatusError) temporary() bool {
	return e.Code == http.StatusTooManyRequests || e.Code == http.StatusRequestTimeout || e.Code >= 500 && e.Code != http.StatusInsufficientStorage
}
