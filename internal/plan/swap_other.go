//go:build !linux && !darwin

package plan

import "errors"

// swap exchanges two directories at once, which this system cannot.
func swap(string, string) error { return errors.ErrUnsupported }
