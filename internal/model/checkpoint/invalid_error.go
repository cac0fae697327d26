// SPDX-License-Identifier: Apache-2.0

package checkpoint

import (
	"errors"
	"fmt"
	"io/fs"
	"syscall"
)

// InvalidError is an error in the model or in the arguments. Retrying does not help until a user changes them. The
// message states the problem, the file, and what to change.
type InvalidError struct{ msg string }

func (e *InvalidError) Error() string { return e.msg }

// Invalidf returns an *InvalidError.
func Invalidf(format string, args ...any) error {
	return &InvalidError{msg: fmt.Sprintf(format, args...)}
}

// IsInvalid reports whether err is, or wraps, an *InvalidError or a *NoPlanError.
func IsInvalid(err error) bool {
	var invalid *InvalidError
	var noPlan *NoPlanError
	return errors.As(err, &invalid) || errors.As(err, &noPlan)
}

// NoPlanError is the reason why no plan can be made for a model, although the model can be served. It is an error of the
// request for a plan only.
type NoPlanError struct {
	// ModelType is model_type in config.json, of the wrapper if there is one.
	ModelType string
	Reason    string
}

func (e *NoPlanError) Error() string { return e.Reason }

// classify turns permanent file system errors (missing, not readable, not a directory) into an *InvalidError that
// states what to do. Other errors, such as a failing network volume, are wrapped unchanged.
func classify(what, path string, err error) error {
	switch {
	case err == nil:
		return nil
	case errors.Is(err, fs.ErrNotExist):
		return Invalidf("%s %s does not exist: check the model path and the volume that holds it", what, path)
	case errors.Is(err, fs.ErrPermission):
		return Invalidf("%s %s is not readable by this user: check its permissions", what, path)
	case errors.Is(err, syscall.ENOTDIR):
		return Invalidf("%s %s does not exist: a part of the path is a file, not a directory", what, path)
	default:
		return fmt.Errorf("%s %s: %w", what, path, err)
	}
}
