// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"fmt"
	"os"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"sigs.k8s.io/controller-runtime/pkg/client/config"

	"github.com/semmoe/operator/cmd/internal/cli"
	"github.com/semmoe/operator/internal/artifact/store"
)

func newStoreCommand() *cobra.Command {
	namespace := cmp.Or(os.Getenv("POD_NAMESPACE"), "semmoe-system")
	service := "semmoe-store." + namespace + ".svc"
	var options store.Options
	var authority, manager string
	var logLevel int
	command := &cobra.Command{
		Use:   "store",
		Short: "Store artifacts by digest in a directory or in S3",
		Args:  cli.NoArgs,
		RunE: func(command *cobra.Command, _ []string) error {
			var err error
			if options.Authority, err = namespacedName("--authority", authority); err != nil {
				return err
			}
			if options.Manager, err = namespacedName("--manager-service-account", manager); err != nil {
				return err
			}
			rest, err := config.GetConfig()
			if err != nil {
				return err
			}
			// Each token costs two requests per minute; many pods may start at once.
			rest.QPS, rest.Burst = 50, 100
			clients, err := kubernetes.NewForConfig(rest)
			if err != nil {
				return err
			}
			cli.Drains(command.Context())
			return store.Run(cli.WithLogger(command.Context(), "store", logLevel), clients, options, nil)
		},
	}
	flags := command.Flags()
	cli.LogLevelFlag(flags, &logLevel)
	flags.StringVar(&options.URL, "url", "", "storage of artifacts: file:///directory, or s3://bucket with parameters such as region, endpoint, use_path_style and ssetype (required)")
	flags.StringVar(&options.BindAddress, "bind-address", ":8443", "address for clients (HTTPS)")
	flags.StringVar(&options.MetricsAddress, "metrics-bind-address", ":9090", "address of /healthz, /readyz and /metrics (HTTP)")
	flags.StringVar(&options.TLSCertFile, "tls-cert-file", "", "PEM file with the server certificate, re-read when it changes (default: a certificate of the store's own authority)")
	flags.StringVar(&options.TLSKeyFile, "tls-key-file", "", "PEM file with the private key of --tls-cert-file")
	flags.StringVar(&authority, "authority", namespace+"/semmoe-store-ca", "namespace/name of the Secret with the store's certificate authority, created at the first start, and of the ConfigMap with its certificate ca.crt for clients")
	flags.StringSliceVar(&options.TLSHosts, "tls-hosts", []string{service, service + ".cluster.local"}, "host names and IP addresses in certificates of the store's own authority")
	flags.StringVar(&manager, "manager-service-account", namespace+"/semmoe-manager", "namespace/name of the ServiceAccount with permission to read, write, list and delete all artifacts")
	flags.Int64Var(&options.MaxArtifactBytes, "max-artifact-bytes", 8<<30, "maximum size of an artifact in bytes")
	flags.DurationVar(&options.DrainTimeout, "drain-timeout", 20*time.Second, "time limit for in-flight transfers after SIGTERM")
	if err := command.MarkFlagRequired("url"); err != nil {
		panic(err) // the flag is defined above
	}
	return command
}

func namespacedName(flag, value string) (types.NamespacedName, error) {
	namespace, name, ok := strings.Cut(value, "/")
	if !ok || namespace == "" || name == "" || strings.Contains(name, "/") {
		return types.NamespacedName{}, fmt.Errorf("%s is %q; it must be namespace/name", flag, value)
	}
	return types.NamespacedName{Namespace: namespace, Name: name}, nil
}
