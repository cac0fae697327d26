// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/go-logr/logr"
	"github.com/spf13/cobra"

	"github.com/semmoe/operator/cmd/internal/cli"
	"github.com/semmoe/operator/internal/artifact"
	"github.com/semmoe/operator/internal/artifact/access"
	"github.com/semmoe/operator/internal/plan"
	"github.com/semmoe/operator/internal/plan/bundle"
)

// fetchPause is the time between two attempts to fetch a plan after an interruption.
const fetchPause = time.Second

// connectStore creates a client of the artifact store; access.FromPod implements it.
type connectStore func(retryFor time.Duration) (*access.Client, error)

// fetchFlags are the flags of semmoe fetch.
type fetchFlags struct {
	namespace, planDigest, tables, out, messageFile string
	wait                                            time.Duration
	optional, follow                                bool
}

func newFetchCommand() *cobra.Command {
	var flags fetchFlags
	command := &cobra.Command{
		Use:   "fetch --namespace NS --plan-digest DIGEST --out DIR",
		Short: "Fetch a plan from the artifact store into a directory, in a pod with that plan",
		Long: "Fetch a complete plan, including tables, from the artifact store, and verify it. The directory is created after all files are present: it\n" +
			"never contains an incomplete plan. If it already contains the plan, the store is not used; another plan is replaced; any other content is an\nerror. " +
			"The pod must have a token for the store and the annotation semmoe.io/plan-digest of the plan. With --optional, a failure to fetch\n" +
			"the plan is reported in the termination message, the exit code is 0, the directory does not exist, and an engine serves without tables.\n" +
			"--tables names a file that maps plan digests to the plans whose tables are in use, as JSON. The directory then contains that plan, which has\n" +
			"the same placement. With --follow the command runs until a signal, and replaces the directory in one step whenever the file names other\n" +
			"tables. Tables that are unavailable, damaged or for another placement or model are reported in the log, and the directory stays. The pod\n" +
			"must also have the annotation semmoe.io/follow-tables.\n" +
			"Exit codes: 3 a flag is invalid; 1 any other error, which a retry may fix.",
		Args: invalidArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			ctx := cli.WithLogger(cmd.Context(), "fetch", 0)
			err := flags.check()
			if err == nil && flags.follow {
				flags.run(ctx, access.FromPod)
				return nil
			}
			if err == nil {
				err = flags.fetch(ctx, access.FromPod)
			}
			message := ""
			if err != nil {
				message = oneLine(err.Error())
			}
			if writeErr := writeTerminationMessage(flags.messageFile, message); writeErr != nil {
				cli.PrintError(cmd.ErrOrStderr(), "semmoe", writeErr)
			}
			switch {
			case err == nil:
				fmt.Fprintf(cmd.OutOrStdout(), "Plan %s is in %s\n", flags.planDigest, flags.out)
				return nil
			case flags.optional && cli.ExitCode(err) != cli.ExitInvalidFile && cmd.Context().Err() == nil:
				cli.PrintError(cmd.ErrOrStderr(), "semmoe", fmt.Errorf("continuing without the plan: %s", message))
				return nil
			}
			return err
		},
	}
	command.SetFlagErrorFunc(func(_ *cobra.Command, err error) error { return cli.WithCode(err, cli.ExitInvalidFile) })
	f := command.Flags()
	f.StringVar(&flags.namespace, "namespace", "", "namespace of the plan, which is the pod's namespace (required)")
	f.StringVar(&flags.planDigest, "plan-digest", "", "full digest of the plan (required)")
	f.StringVar(&flags.tables, "tables", "", "file with the plans whose tables are in use (default: each plan uses its own)")
	f.BoolVar(&flags.follow, "follow", false, "run until a signal, and follow --tables")
	f.StringVar(&flags.out, "out", "", "output directory (required)")
	f.DurationVar(&flags.wait, "wait", 2*time.Minute, "time limit for retries of an unavailable store, or of an interrupted transfer")
	f.BoolVar(&flags.optional, "optional", false, "exit code 0 even if the plan cannot be fetched")
	f.StringVar(&flags.messageFile, "termination-message", "", "file for the termination message (default "+terminationLog+", if it exists)")
	return command
}

func (f fetchFlags) check() error {
	invalid := func(format string, args ...any) error {
		return cli.WithCode(fmt.Errorf(format, args...), cli.ExitInvalidFile)
	}
	for _, flag := range []struct{ name, value string }{{"namespace", f.namespace}, {"plan-digest", f.planDigest}, {"out", f.out}} {
		if flag.value == "" {
			return invalid("--%s is missing", flag.name)
		}
	}
	if f.follow && f.tables == "" {
		return invalid("--follow needs --tables")
	}
	if f.wait < 0 {
		return invalid("--wait is %v; it must be at least 0", f.wait)
	}
	if _, err := bundle.Scope(f.namespace, f.planDigest); err != nil {
		return invalid("--namespace and --plan-digest: %w", err)
	}
	if err := plan.CheckReplaceable(f.out); err != nil {
		return invalid("--out: %w", err)
	}
	return nil
}

// run follows the tables until the context ends.
func (f fetchFlags) run(ctx context.Context, connect connectStore) {
	(&bundle.Follower{
		Namespace: f.namespace, PlanDigest: f.planDigest, Dir: f.out, Tables: f.tables,
		Connect: func() (*access.Client, error) { return connect(0) }, // the follower itself retries
	}).Run(ctx)
}

// fetch fetches the plan with the tables in use from the store that connect returns. If that fails, it tries the plan
// itself once.
func (f fetchFlags) fetch(ctx context.Context, connect connectStore) error {
	wanted := f.planDigest
	if f.tables != "" {
		named, err := bundle.Wanted(f.tables, f.planDigest)
		if err != nil {
			logr.FromContextOrDiscard(ctx).Error(err, "Failed to read which tables are in use; using those of the plan")
		} else {
			wanted = named
		}
	}
	err := f.fetchPlan(ctx, connect, wanted, f.wait)
	if err == nil || wanted == f.planDigest || ctx.Err() != nil {
		return err
	}
	logr.FromContextOrDiscard(ctx).Error(err, "Failed to fetch the tables in use; using those of the plan", "tables", artifact.Digest(wanted).Short())
	return f.fetchPlan(ctx, connect, f.planDigest, 0)
}

// fetchPlan fetches a plan, and retries for up to wait.
func (f fetchFlags) fetchPlan(ctx context.Context, connect connectStore, digest string, wait time.Duration) error {
	if bundle.IsComplete(f.out, digest) { // needs neither the store nor its token
		return nil
	}
	client, err := connect(wait)
	if err == nil {
		err = f.fetchWithRetries(ctx, client, digest, wait)
	}
	if errors.Is(err, artifact.ErrNotFound) {
		return fmt.Errorf("the artifact store does not have the plan: %w", err)
	}
	return err
}

// fetchWithRetries restarts interrupted transfers for up to wait: the client itself retries only before a response has
// started.
func (f fetchFlags) fetchWithRetries(ctx context.Context, client *access.Client, digest string, wait time.Duration) error {
	var end time.Time
	for {
		err := bundle.FetchTables(ctx, client, f.namespace, f.planDigest, digest, f.out)
		if !errors.Is(err, artifact.ErrInterrupted) {
			return err
		}
		if end.IsZero() {
			end = time.Now().Add(wait)
		}
		if time.Now().Add(fetchPause).After(end) {
			return err
		}
		select {
		case <-ctx.Done():
			return errors.Join(err, ctx.Err())
		case <-time.After(fetchPause):
		}
	}
}
