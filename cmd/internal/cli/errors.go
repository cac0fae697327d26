// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"errors"
	"fmt"
	"os"

	"github.com/spf13/cobra"

	"github.com/semmoe/operator/internal/files/regularfile"
	"github.com/semmoe/operator/internal/model/checkpoint"
	"github.com/semmoe/operator/internal/plan"
	"github.com/semmoe/operator/solver/trace"
)

// Exit codes of commands that read models, traces and plans. Exit code 1 means any error that a retry may fix.
const (
	ExitUsage       = 2
	ExitInvalidFile = 3
)

// codedError is an error with an exit code.
type codedError struct {
	error
	code int
}

func (e codedError) Unwrap() error { return e.error }
func (e codedError) ExitCode() int { return e.code }

// WithCode adds an exit code to an error.
func WithCode(err error, code int) error { return codedError{err, code} }

// UsageErrorf returns an error about the command line.
func UsageErrorf(format string, args ...any) error {
	return codedError{fmt.Errorf(format, args...), ExitUsage}
}

// InputError adds the exit code of invalid files to an error about a trace, a plan or a model.
func InputError(err error) error {
	if trace.IsInvalid(err) || plan.IsInvalid(err) || checkpoint.IsInvalid(err) || errors.Is(err, os.ErrNotExist) || errors.Is(err, regularfile.ErrTooLarge) {
		return codedError{err, ExitInvalidFile}
	}
	return err
}

// FlagError returns an error of a flag as an error about the command line.
func FlagError(_ *cobra.Command, err error) error { return codedError{err, ExitUsage} }

// NoArgs rejects arguments of a command that only has flags.
func NoArgs(cmd *cobra.Command, args []string) error {
	if err := cobra.NoArgs(cmd, args); err != nil {
		return codedError{err, ExitUsage}
	}
	return nil
}
