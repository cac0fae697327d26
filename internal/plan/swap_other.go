// SPDX-License-Identifier: Apache-2.0

//go:build !linux && !darwin

package plan

import "errors"

// swap returns an error, because this system cannot exchange two directories atomically.
func swap(string, string) error { return errors.ErrUnsupported }
