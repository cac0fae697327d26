// Command semmoe is the static binary of the Sem-MoE operator. Every role of the system is one of its subcommands, so
// that one image serves all roles.
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

	"github.com/semmoe/operator/internal/httpserver/buildinfo"
	"github.com/semmoe/operator/internal/kube/printable"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := execute(ctx, newRootCommand(), os.Args[1:]); err != nil {
		printError(os.Stderr, err)
		os.Exit(exitCode(err))
	}
}

// printError writes an error, which may quote files and servers. A long error, such as the list of reasons of a usage
// error, keeps its line breaks.
func printError(w io.Writer, err error) {
	for i, line := range strings.Split(err.Error(), "\n") {
		if i == 0 {
			line = "semmoe: " + line
		}
		fmt.Fprintln(w, printable.Runes(line))
	}
}

// endGrace is the time limit for the end of a command that serves no requests, after a signal. A command may wait for
// an unavailable API server, artifact store or engine. No command needs an orderly end: each continues from what it has
// written.
const endGrace = 1500 * time.Millisecond

// drains is the annotation of a command that serves requests, and ends by itself soon after the last one.
const drains = "semmoe.io/drains"

// execute runs a command until it ends, or until endGrace after a signal.
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
		return fmt.Errorf("the command did not end within %v after a signal", endGrace)
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
				return usageErrorf("unknown command %q; semmoe --help lists all commands", args[0])
			}
			return nil
		},
		RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	// Commands with a different exit code for usage errors override this function.
	root.SetFlagErrorFunc(func(_ *cobra.Command, err error) error { return codedError{err, exitUsage} })
	root.AddCommand(newManagerCommand(), newInspectCommand(), newRouterCommand(), newEngineCommand(), newProfileCommand(), newStoreCommand(),
		newSolveCommand(), newReplanCommand(), newEvalCommand(), newDriftCommand(), newVerifyCommand(), newCompareCommand(), newStatsCommand(), newReshuffleCommand(),
		newProbeCommand(), newLookAheadCommand(), newFetchCommand(), newReportCommand(), newCalibrateCommand(), newFitCommand(), newPipelineCommand(),
		newSimulateCommand())
	return root
}

// exitCode returns the error's own exit code, or 1 if it has none.
func exitCode(err error) int {
	var coded interface{ ExitCode() int }
	if errors.As(err, &coded) {
		return coded.ExitCode()
	}
	return 1
}

// withLogger adds the process's logger to a context: JSON on standard error. The standard logger, which http.Transport
// and http.Server use, writes there as well.
func withLogger(ctx context.Context, name string) context.Context {
	log := zap.New(zap.UseDevMode(false), zap.WriteTo(printable.JSON(os.Stderr))).WithName(name)
	ctrl.SetLogger(log)
	klog.SetLogger(log)
	slog.SetDefault(slog.New(logr.ToSlogHandler(log))) // also redirects package log
	return logr.NewContext(ctx, log)
}
