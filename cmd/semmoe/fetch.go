package main

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/spf13/cobra"

	"github.com/semmoe/operator/internal/artifact"
	"github.com/semmoe/operator/internal/artifact/access"
	"github.com/semmoe/operator/internal/plan"
	"github.com/semmoe/operator/internal/plan/bundle"
)

// fetchPause is waited before a plan is fetched anew whose fetching was interrupted.
const fetchPause = time.Second

// connectStore makes a client of the artifact store, for which access.FromPod is.
type connectStore func(retryFor time.Duration) (*artifact.Client, error)

// fetchFlags are the flags of semmoe fetch.
type fetchFlags struct {
	namespace, planDigest, out, messageFile string
	wait                                    time.Duration
	optional                                bool
}

func newFetchCommand() *cobra.Command {
	var flags fetchFlags
	command := &cobra.Command{
		Use:   "fetch --namespace NS --plan-digest DIGEST --out DIR",
		Short: "Fetch a plan from the artifact store into a directory, in a pod that was made for it",
		Long: "Fetch a whole plan, tables included, from the artifact store, and verify it. The directory is made when all of it is there: it never\n" +
			"holds a part. Where it holds the plan already the store is not asked; another plan in it is replaced, and anything else refused.\n" +
			"The pod must have a token for the store, and bear the annotation semmoe.io/plan-digest of that plan. With --optional a plan that\n" +
			"cannot be fetched is no failure: the reason stands in the termination message, the directory is not there, and an engine serves\n" +
			"without tables. Exit code 3: a flag is at fault; 1: try again.",
		Args: invalidArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			err := flags.check()
			if err == nil {
				err = flags.fetch(cmd.Context(), access.FromPod)
			}
			message := ""
			if err != nil {
				message = oneLine(err.Error())
			}
			if writeErr := writeTerminationMessage(flags.messageFile, message); writeErr != nil {
				printError(cmd.ErrOrStderr(), writeErr)
			}
			switch {
			case err == nil:
				fmt.Fprintf(cmd.OutOrStdout(), "Plan %s is in %s\n", flags.planDigest, flags.out)
				return nil
			case flags.optional && exitCode(err) != exitInvalidFile && cmd.Context().Err() == nil:
				printError(cmd.ErrOrStderr(), fmt.Errorf("going on without the plan: %s", message))
				return nil
			}
			return err
		},
	}
	command.SetFlagErrorFunc(func(_ *cobra.Command, err error) error { return codedError{err, exitInvalidFile} })
	f := command.Flags()
	f.StringVar(&flags.namespace, "namespace", "", "namespace that the plan is of: the pod's own (required)")
	f.StringVar(&flags.planDigest, "plan-digest", "", "full digest of the plan (required)")
	f.StringVar(&flags.out, "out", "", "directory to make (required)")
	f.DurationVar(&flags.wait, "wait", 2*time.Minute, "how long a store that is away, or goes away while it answers, is asked again")
	f.BoolVar(&flags.optional, "optional", false, "exit with 0 although the plan could not be fetched")
	f.StringVar(&flags.messageFile, "termination-message", "", "file for the termination message (default "+terminationLog+", if it exists)")
	return command
}

func (f fetchFlags) check() error {
	invalid := func(format string, args ...any) error {
		return codedError{fmt.Errorf(format, args...), exitInvalidFile}
	}
	for _, flag := range []struct{ name, value string }{{"namespace", f.namespace}, {"plan-digest", f.planDigest}, {"out", f.out}} {
		if flag.value == "" {
			return invalid("--%s is missing", flag.name)
		}
	}
	if f.wait < 0 {
		return invalid("--wait is %v; it must not be negative", f.wait)
	}
	if _, err := bundle.Scope(f.namespace, f.planDigest); err != nil {
		return invalid("--namespace and --plan-digest: %w", err)
	}
	if err := plan.CheckReplaceable(f.out); err != nil {
		return invalid("--out: %w", err)
	}
	return nil
}

// fetch fetches from the store that connect reaches.
func (f fetchFlags) fetch(ctx context.Context, connect connectStore) error {
	if bundle.Holds(f.out, f.planDigest) { // needs neither the store nor its token
		return nil
	}
	client, err := connect(f.wait)
	if err == nil {
		err = f.fetchAnew(ctx, client)
	}
	if errors.Is(err, artifact.ErrNotFound) {
		return fmt.Errorf("the artifact store does not have the plan: %w", err)
	}
	return err
}

// fetchAnew begins anew where the store goes away in the middle of an answer, for as long as it may be away: the client asks again only
// while no answer has begun.
func (f fetchFlags) fetchAnew(ctx context.Context, client *artifact.Client) error {
	var end time.Time
	for {
		err := bundle.Fetch(ctx, client, f.namespace, f.planDigest, f.out)
		if !errors.Is(err, artifact.ErrInterrupted) {
			return err
		}
		if end.IsZero() {
			end = time.Now().Add(f.wait)
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
