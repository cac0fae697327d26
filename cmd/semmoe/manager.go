// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	"github.com/spf13/cobra"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/healthz"
	metricsserver "sigs.k8s.io/controller-runtime/pkg/metrics/server"

	"github.com/semmoe/operator/cmd/internal/cli"
	"github.com/semmoe/operator/controllers"
	"github.com/semmoe/operator/controllers/retention"
	"github.com/semmoe/operator/internal/artifact"
	"github.com/semmoe/operator/internal/artifact/access"
	"github.com/semmoe/operator/internal/observation/promquery"
	"github.com/semmoe/operator/internal/router/managerauth"
	"github.com/semmoe/operator/webhook"
)

// stopTimeout is the time limit between a signal and the release of the leader lease. It leaves a third of endGrace for
// the release, which may use releaseTimeout.
const stopTimeout = time.Second

func newManagerCommand() *cobra.Command {
	var options controllers.Options
	var store access.Access
	var storeCA, pull, routerAuthority, metricsAddress, metricsCertDir, healthAddress string
	var prometheusHosts []string
	var logLevel int
	var webhooks webhookOptions
	// A lost leader is replaced within 20 s: a successor may see the last renewal 2.2 retry periods late, waits for the
	// lease to expire, and may acquire it 2.2 periods later (client-go's jitter). A leader that stops in order releases
	// its lease immediately.
	lease, renew, retry := 15*time.Second, 10*time.Second, time.Second
	stop := stopTimeout
	base := ctrl.Options{
		Metrics:                       metricsserver.Options{BindAddress: noServer},
		HealthProbeBindAddress:        noServer,
		LeaderElectionID:              "manager.semmoe.io",
		LeaderElectionReleaseOnCancel: true,
		GracefulShutdownTimeout:       &stop,
		LeaseDuration:                 &lease,
		RenewDeadline:                 &renew,
		RetryPeriod:                   &retry,
	}
	command := &cobra.Command{
		Use:   "manager",
		Short: "Run the operator's controllers",
		Args:  cli.NoArgs,
		RunE: func(command *cobra.Command, _ []string) error {
			ctx := cli.WithLogger(command.Context(), "manager", logLevel)
			var err error
			if options.PullPolicy, err = pullPolicy(pull); err != nil {
				return err
			}
			config, err := ctrl.GetConfig()
			if err != nil {
				return err
			}
			if options.Image == "" {
				if options.Image, err = ownImage(ctx, config); err != nil {
					return fmt.Errorf("--image is not set, and the image of this pod cannot be read: %w", err)
				}
			}
			if store.CA, err = namespacedName("--store-ca", storeCA); err != nil {
				return err
			}
			if options.PrometheusHosts, err = promquery.ParseHosts(prometheusHosts); err != nil {
				return fmt.Errorf("--prometheus-hosts: %w", err)
			}
			options.Store, options.OwnNamespace = &store, os.Getenv("POD_NAMESPACE")
			base.LeaderElectionNamespace = options.OwnNamespace
			if options.Routers, err = routerIdentity(ctx, config, routerAuthority); err != nil {
				return err
			}
			var certificates *webhook.Certificates
			if webhooks.enabled() {
				if base.WebhookServer, certificates, err = webhooks.server(config); err != nil {
					return err
				}
			}
			if base.LeaderElection {
				base.LeaderElectionConfig = leaseConfig(ctx, config)
			}
			manager, err := controllers.NewManager(config, options, base)
			if err != nil {
				return err
			}
			ready := map[string]healthz.Checker{"ping": healthz.Ping}
			if webhooks.enabled() {
				if err := webhooks.serve(manager, certificates, options.PrometheusHosts); err != nil {
					return err
				}
				ready["webhook"] = base.WebhookServer.StartedChecker()
			}
			if err := errors.Join(addMetricsServer(manager, metricsAddress, metricsCertDir), addHealthServer(manager, healthAddress, ready)); err != nil {
				return err
			}
			return manager.Start(ctx)
		},
	}
	flags := command.Flags()
	cli.LogLevelFlag(flags, &logLevel)
	flags.StringVar(&options.Image, "image", "", "image of the operator's containers, such as request router and inspection (default: the image of the pod $POD_NAMESPACE/$POD_NAME)")
	flags.StringVar(&pull, "image-pull-policy", "", "pull policy of the operator's image in new pods: Always, IfNotPresent or Never (default: the API server's default for the image)")
	flags.StringSliceVar(&options.Namespaces, "namespaces", nil, "namespaces to watch (default: all)")
	flags.StringVar(&store.URL, "store-url", "", "URL of the artifact store, https://host; required for profiling and planning")
	flags.StringVar(&storeCA, "store-ca", cmp.Or(os.Getenv("POD_NAMESPACE"), "semmoe-system")+"/semmoe-store-ca", "namespace/name of the ConfigMap with the store's certificate authority as ca.crt")
	flags.StringVar(&store.TokenFile, "store-token-file", artifact.TokenFile, "file with the manager's token for the store")
	flags.StringVar(&routerAuthority, "router-client-authority", cmp.Or(os.Getenv("POD_NAMESPACE"), "semmoe-system")+"/"+managerauth.SecretName, "namespace/name of the Secret with the certificate authority that authenticates managers to request routers; created if missing")
	flags.StringSliceVar(&prometheusHosts, "prometheus-hosts", nil, "hosts (name or IP address, optional port) allowed in drift.prometheus.address in all namespaces; Services with a cluster IP in the object's namespace are always allowed")
	flags.IntVar(&options.SolverWorkers, "solver-workers", 1, "number of concurrently solved plans; each keeps a routing trace in memory")
	flags.DurationVar(&options.Retention, "artifact-retention", retention.DefaultRetention, "retention time of artifacts in the store after the last reference by an object")
	flags.StringVar(&metricsAddress, "metrics-bind-address", ":8443", "address of the metrics endpoint (HTTPS, with authentication and authorization by the API server); 0 disables it")
	flags.StringVar(&metricsCertDir, "metrics-cert-dir", "", "directory with tls.crt and tls.key of the metrics endpoint, re-read after a change (default: a self-signed certificate)")
	flags.StringVar(&healthAddress, "health-probe-bind-address", ":8081", "address of /healthz and /readyz")
	webhooks.addFlags(flags)
	flags.BoolVar(&base.LeaderElection, "leader-elect", false, "leader election among several managers")
	return command
}

// pullPolicy parses --image-pull-policy, which may be empty.
func pullPolicy(text string) (corev1.PullPolicy, error) {
	switch policy := corev1.PullPolicy(text); policy {
	case "", corev1.PullAlways, corev1.PullIfNotPresent, corev1.PullNever:
		return policy, nil
	}
	return "", fmt.Errorf("--image-pull-policy %q: must be Always, IfNotPresent or Never", text)
}

// ownImage returns the image of this process from its pod.
func ownImage(ctx context.Context, config *rest.Config) (string, error) {
	clients, err := kubernetes.NewForConfig(config)
	if err != nil {
		return "", err
	}
	namespace, name := os.Getenv("POD_NAMESPACE"), os.Getenv("POD_NAME")
	if namespace == "" || name == "" {
		return "", fmt.Errorf("the environment variables POD_NAMESPACE and POD_NAME are not set")
	}
	pod, err := clients.CoreV1().Pods(namespace).Get(ctx, name, metav1.GetOptions{})
	if err != nil {
		return "", err
	}
	for _, container := range pod.Spec.Containers {
		if container.Name == "manager" {
			return container.Image, nil
		}
	}
	return "", fmt.Errorf("pod %s/%s has no container named manager", namespace, name)
}

// routerIdentity loads the identity that authenticates this manager to request routers.
func routerIdentity(ctx context.Context, config *rest.Config, secret string) (*managerauth.Identity, error) {
	name, err := namespacedName("--router-client-authority", secret)
	if err != nil {
		return nil, err
	}
	clients, err := kubernetes.NewForConfig(config)
	if err != nil {
		return nil, err
	}
	return managerauth.Load(ctx, clients, name)
}
