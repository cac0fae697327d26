// SPDX-License-Identifier: Apache-2.0

// Package cli contains what the command lines of semmoe, semmoe-lab and semmoe-refengine share: the life of a process,
// exit codes, flags that several commands have, and progress on a terminal. Start reading at Main.
package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/signal"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/go-logr/logr"
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"go.uber.org/zap/zapcore"
	"k8s.io/klog/v2"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/log/zap"

	"github.com/semmoe/operator/internal/httpserver/buildinfo"
	"github.com/semmoe/operator/internal/kube/printable"
)

// Main executes a command line and ends the process.
func Main(root *cobra.Command) {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := execute(ctx, root, os.Args[1:]); err != nil {
		PrintError(os.Stderr, root.Name(), err)
		os.Exit(ExitCode(err))
	}
}

// PrintError writes an error, which may quote files and servers. A long error, such as the list of reasons of a usage
// error, keeps its line breaks.
func PrintError(w io.Writer, program string, err error) {
	for i, line := range strings.Split(err.Error(), "\n") {
		if i == 0 {
			line = program + ": " + line
		}
		fmt.Fprintln(w, printable.Runes(line))
	}
}

// endGrace is the time limit for the end of a command that serves no requests, after a signal. A command may wait for
// an unavailable API server, artifact store or engine. No command needs an orderly end: each continues from what it has
// written.
const endGrace = 1500 * time.Millisecond

// drainsKey is the context key of whether the command drains.
type drainsKey struct{}

// Drains declares that from now on the command serves requests, and ends by itself soon after the last one.
func Drains(ctx context.Context) {
	if drains, ok := ctx.Value(drainsKey{}).(*atomic.Bool); ok {
		drains.Store(true)
	}
}

// execute runs a command until it ends, or until endGrace after a signal.
func execute(ctx context.Context, root *cobra.Command, args []string) error {
	root.SetArgs(args)
	ended, drains := make(chan error, 1), new(atomic.Bool)
	ctx = context.WithValue(ctx, drainsKey{}, drains)
	go func() { ended <- root.ExecuteContext(ctx) }()
	select {
	case err := <-ended:
		return err
	case <-ctx.Done():
	}
	if drains.Load() {
		return <-ended
	}
	select {
	case err := <-ended:
		return err
	case <-time.After(endGrace):
		return fmt.Errorf("the command did not end within %v after a signal", endGrace)
	}
}

// NewRoot returns a command with subcommands. Without one it prints its help. moved names the program that has a
// command now, by the name of the command.
func NewRoot(name, short string, moved map[string]string, commands ...*cobra.Command) *cobra.Command {
	root := &cobra.Command{
		Use:           name,
		Short:         short,
		SilenceUsage:  true,
		SilenceErrors: true,
		Version:       buildinfo.Read().String(),
		Args: func(_ *cobra.Command, args []string) error {
			if len(args) > 0 {
				return UsageErrorf("unknown command %q; %s --help lists all commands", args[0], name)
			}
			return nil
		},
		RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	// Commands with a different exit code for usage errors override this function.
	root.SetFlagErrorFunc(FlagError)
	root.AddCommand(commands...)
	for command, program := range moved {
		root.AddCommand(&cobra.Command{
			Use: command, Hidden: true, DisableFlagParsing: true,
			RunE: func(*cobra.Command, []string) error { return UsageErrorf("this command moved to %s", program) },
		})
	}
	return root
}

// ExitCode returns the error's own exit code, or 1 if it has none.
func ExitCode(err error) int {
	var coded interface{ ExitCode() int }
	if errors.As(err, &coded) {
		return coded.ExitCode()
	}
	return 1
}

// maxLogLevel is the highest verbosity that this program and its libraries use.
const maxLogLevel = 9

// LogLevelFlag adds --log-level, from 0 to maxLogLevel. The value is for WithLogger.
func LogLevelFlag(f *pflag.FlagSet, level *int) {
	f.Var((*logLevel)(level), "log-level", fmt.Sprintf("verbosity of the log, 0 to %d: 0 is changes and errors, 1 adds every decision and write, 2 and more add details of libraries", maxLogLevel))
}

// logLevel is the value of --log-level.
type logLevel int

func (l *logLevel) String() string { return strconv.Itoa(int(*l)) }
func (l *logLevel) Type() string   { return "int" }

// Set returns an error for a text that is not a verbosity.
func (l *logLevel) Set(text string) error {
	level, err := strconv.Atoi(text)
	if err != nil || level < 0 || level > maxLogLevel {
		return fmt.Errorf("allowed are the numbers 0 to %d", maxLogLevel)
	}
	*l = logLevel(level)
	return nil
}

// WithLogger adds the process's logger to a context: JSON on standard error, with messages of at most the given
// verbosity. The standard logger, which http.Transport and http.Server use, writes there as well.
func WithLogger(ctx context.Context, name string, level int) context.Context {
	log := zap.New(zap.UseDevMode(false), zap.Level(zapcore.Level(-level)), zap.WriteTo(printable.JSON(os.Stderr))).WithName(name)
	ctrl.SetLogger(log)
	klog.SetLogger(log)
	slog.SetDefault(slog.New(logr.ToSlogHandler(log))) // also redirects package log
	return logr.NewContext(ctx, log)
}
