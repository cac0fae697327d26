// Command semmoe is the one static binary of the Sem-MoE operator: every role of the system is one of its subcommands,
// so that one image serves them all.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"time"

	"github.com/go-logr/logr"
	"github.com/spf13/cobra"
	"k8s.io/klog/v2"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/log/zap"

	"github.com/semmoe/operator/internal/buildinfo"
	"github.com/semmoe/operator/internal/printable"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := execute(ctx, newRootCommand(), os.Args[1:]); err != nil {
		printError(os.Stderr, err)
		os.Exit(exitCode(err))
	}
}

// printError writes an error, which may quote files and servers. A long one, such as the reasons of a usage error, keeps its lines.
func printError(w io.Writer, err error) {
	for i, line := range strings.Split(err.Error(), "\n") {
		if i == 0 {
			line = "semmoe: " + line
		}
		fmt.Fprintln(w, printable.Runes(line))
	}
}

// endGrace is how long a command that serves no requests may take to end after a signal. What the command waits for may be away: the
// API server, the artifact store or an engine. No command needs its end: each starts again from what it has written.
const endGrace = 1500 * time.Millisecond

// drains marks a command that serves requests, and ends by itself soon after the last one.
const drains = "semmoe.io/drains"

// execute runs a command until it ends, or does not end after a signal.
func execute(ctx context.Context, root *cobra.Command, args []string) error {
	root.SetArgs(args)
	ended := make(chan error, 1)
	go func() { ended <- root.ExecuteContext(ctx) }()
	select {
	case err := <-ended:
		return err
	case <-ctx.Done():
	}
	if command, _, err := root.Find(args); err == nil && command.Annotations[drains] != "" {
		return <-ended
	}
	select {
	case err := <-ended:
		return err
	case <-time.After(endGrace):
		return fmt.Errorf("failed to end within %v of a signal", endGrace)
	}
}

func newRootCommand() *cobra.Command {
	root := &cobra.Command{
		Use:           "semmoe",
		Short:         "Co-schedule Mixture-of-Experts models and their requests on Kubernetes",
		SilenceUsage:  true,
		SilenceErrors: true,
		Version:       buildinfo.Read().String(),
		Args: func(_ *cobra.Command, args []string) error {
			if len(args) > 0 {
				return usageErrorf("there is no command %q: semmoe --help lists them", args[0])
			}
			return nil
		},
		RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	// Commands with exit codes of their own for that say so.
	root.SetFlagErrorFunc(func(_ *cobra.Command, err error) error { return codedError{err, exitUsage} })
	root.AddCommand(newManagerCommand(), newInspectCommand(), newRouterCommand(), newEngineCommand(), newProfileCommand(), newStoreCommand(),
		newSolveCommand(), newReplanCommand(), newEvalCommand(), newDriftCommand(), newVerifyCommand(), newCompareCommand(), newStatsCommand(), newReshuffleCommand(),
		newProbeCommand(), newLookAheadCommand(), newFetchCommand(), newReportCommand(), newCalibrateCommand(), newFitCommand(), newPipelineCommand(),
		newSimulateCommand())
	return root
}

// exitCode is 1 unless the error carries a code of its own.
func exitCode(err error) int {
	var coded interface{ ExitCode() int }
	if errors.As(err, &coded) {
		return coded.ExitCode()
	}
	return 1
}

// withLogger puts the process's logger into a context: JSON on standard error, for machines to collect. Lines of the standard logger, to
// which http.Transport and http.Server write, go there as well.
func withLogger(ctx context.Context, name string) context.Context {
	log := zap.New(zap.UseDevMode(false), zap.WriteTo(printable.JSON(os.Stderr))).WithName(name)
	ctrl.SetLogger(log)
	klog.SetLogger(log)
	slog.SetDefault(slog.New(logr.ToSlogHandler(log))) // also redirects package log
	return logr.NewContext(ctx, log)
}
