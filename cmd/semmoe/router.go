package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	"github.com/spf13/cobra"
	"k8s.io/client-go/kubernetes"
	"sigs.k8s.io/controller-runtime/pkg/client/config"

	"github.com/semmoe/operator/internal/artifact/access"
	"github.com/semmoe/operator/internal/engine/registry"
	"github.com/semmoe/operator/internal/plan/bundle"
	"github.com/semmoe/operator/internal/router"
)

func newRouterCommand() *cobra.Command {
	var options router.Options
	var engineType, liveSamples string
	command := &cobra.Command{
		Use:   "router",
		Short: "Send requests to the ranks of the engine pods of one MoEDeployment",
		Long: "Send requests to the ranks of the engine pods of one MoEDeployment. Ranks are chosen by the plans that the pods name,\n" +
			"which come from the artifact store that the environment variables " + access.URLVariable + " and " + access.CAVariable + " name;\n" +
			"without them, by load alone.",
		Args: cobra.NoArgs,
		RunE: func(command *cobra.Command, _ []string) error {
			if options.Namespace == "" || options.Selector == "" {
				return errors.New("--namespace and --selector are required: they find the engine pods")
			}
			adapter, err := registry.For(engineType)
			if err != nil {
				return err
			}
			if options.SamplePercent < 0 || options.SamplePercent > 100 {
				return fmt.Errorf("--sample-percent is %d: want 0 to 100", options.SamplePercent)
			}
			if options.SamplePercent > 0 && !adapter.TellsExperts() {
				return fmt.Errorf("--sample-percent is %d: engine %s does not tell the experts of a request; want 0", options.SamplePercent, engineType)
			}
			if options.LiveSamples, err = router.ParseLiveSamples(liveSamples); err != nil {
				return fmt.Errorf("--live-samples: %w", err)
			}
			options.FetchPlan = planFetcher(options.Namespace)
			options.RankHeader, options.RoutingKeyHeader, options.RoutedExperts = adapter.RankHeader, adapter.RoutingKeyHeader, adapter.RoutedExperts
			rest, err := config.GetConfig()
			if err != nil {
				return err
			}
			clients, err := kubernetes.NewForConfig(rest)
			if err != nil {
				return err
			}
			return router.Run(withLogger(command.Context(), "router"), clients, options)
		},
	}
	flags := command.Flags()
	flags.StringVar(&options.Namespace, "namespace", "", "namespace of the engine pods")
	flags.StringVar(&options.Selector, "selector", "", "label selector of the engine pods")
	flags.StringVar(&options.Host, "host", "", "address to listen on (default: all)")
	flags.IntVar(&options.Port, "port", 8000, "port for clients")
	flags.IntVar(&options.MetricsPort, "metrics-port", 9090, "port for /healthz, /readyz and /metrics")
	flags.StringVar(&options.SnapshotDir, "snapshot-dir", "/var/lib/semmoe", "directory in which the last known endpoints and the plans are kept, so that the router can start without the API server")
	flags.StringVar(&engineType, "engine", "SGLang", "type of the engines: "+registry.Types())
	flags.IntVar(&options.SamplePercent, "sample-percent", 0, "share of requests of which the engine is asked for the experts that their tokens activated")
	flags.StringVar(&liveSamples, "live-samples", string(router.LiveCounts), "what is kept of the tokens of sampled requests: counts of token ids, experts and hashed bigrams; sequences, which also keeps prompts and answers as token ids; or none")
	flags.Int64Var(&options.MaxBodyBytes, "max-body-bytes", 32<<20, "largest request body that is accepted")
	flags.DurationVar(&options.EndpointWait, "endpoint-wait", 10*time.Second, "how long a request waits for a ready pod before it is answered with 503")
	flags.DurationVar(&options.ClientTimeout, "client-timeout", time.Minute, "how long a client may take to send a body, and how long it may take nothing of an answer; 0 for ever")
	flags.DurationVar(&options.ShutdownDelay, "shutdown-delay", 0, "how long the router takes new connections after SIGTERM although it is no longer ready; for where nothing else, such as a preStop hook, lets load balancers see first that it goes")
	flags.DurationVar(&options.DrainTimeout, "drain-timeout", 5*time.Minute, "how long running requests may take after that")
	return command
}

// storeRetry bounds one attempt to fetch a plan from a store that is away; attempts are repeated with pauses.
const storeRetry = 10 * time.Second

// planFetcher brings the plans of a namespace from the artifact store that the environment names; it is nil where that
// names none. The client is made for each plan: a token that cannot be read yet costs an attempt, not the router.
func planFetcher(namespace string) router.FetchPlan {
	if os.Getenv(access.URLVariable) == "" && os.Getenv(access.CAVariable) == "" {
		return nil
	}
	return func(ctx context.Context, digest, dir string) error {
		client, err := access.FromPod(storeRetry)
		if err != nil {
			return err
		}
		return bundle.Fetch(ctx, client, namespace, digest, dir)
	}
}
