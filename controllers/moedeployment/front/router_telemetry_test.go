// SPDX-License-Identifier: Apache-2.0

package front

import (
	"slices"
	"strings"
	"testing"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/controllers/moedeployment/moedtest"
	"github.com/semmoe/operator/internal/router/telemetry"
)

// TestRouterTelemetry checks the arguments and variables for spans and the access log. The headers of the export are
// read from their Secret by the pod.
func TestRouterTelemetry(t *testing.T) {
	const collector = "http://collector.observability:4318"
	for name, tc := range map[string]struct {
		routing semmoev1.RoutingSpec
		args    string
		env     string
		secrets string
	}{
		"neither":    {semmoev1.RoutingSpec{}, "", "", ""},
		"access log": {semmoev1.RoutingSpec{AccessLogPercent: new(int32(5))}, "--access-log-percent=5", "", ""},
		"spans":      {semmoev1.RoutingSpec{Tracing: &semmoev1.RoutingTracing{Endpoint: collector}}, "--otlp-endpoint=" + collector, "", ""},
		"only continued traces": {semmoev1.RoutingSpec{Tracing: &semmoev1.RoutingTracing{Endpoint: collector, SamplePercent: new(int32(0))}},
			"--otlp-endpoint=" + collector + " --trace-percent=0", "", ""},
		"headers and authority": {semmoev1.RoutingSpec{Tracing: &semmoev1.RoutingTracing{Endpoint: collector, HeadersSecretName: "export", CASecretName: "authority"}},
			"--otlp-endpoint=" + collector, "OTEL_EXPORTER_OTLP_HEADERS=export/headers OTEL_EXPORTER_OTLP_CERTIFICATE=/etc/semmoe/collector-ca/ca.crt", "authority"},
	} {
		t.Run(name, func(t *testing.T) {
			moed := moedtest.Deployment(func(m *semmoev1.MoEDeployment) {
				m.Spec.Routing.Tracing, m.Spec.Routing.AccessLogPercent = tc.routing.Tracing, tc.routing.AccessLogPercent
			})
			pod := routerDeployment(moed, "semmoe:1", "uid", "PEM").Spec.Template.Spec
			args := slices.DeleteFunc(slices.Clone(pod.Containers[0].Args), func(arg string) bool {
				return !strings.HasPrefix(arg, "--otlp-") && !strings.HasPrefix(arg, "--trace-") && !strings.HasPrefix(arg, "--access-")
			})
			if got := strings.Join(args, " "); got != tc.args {
				t.Errorf("arguments %q, want %q", got, tc.args)
			}
			var env, secrets []string
			for _, variable := range pod.Containers[0].Env {
				switch {
				case !strings.HasPrefix(*variable.Name, "OTEL_"):
				case variable.Value != nil:
					env = append(env, *variable.Name+"="+*variable.Value)
				default:
					env = append(env, *variable.Name+"="+*variable.ValueFrom.SecretKeyRef.Name+"/"+*variable.ValueFrom.SecretKeyRef.Key)
				}
			}
			if got := strings.Join(env, " "); got != tc.env {
				t.Errorf("variables %q, want %q", got, tc.env)
			}
			for _, volume := range pod.Volumes {
				if volume.Secret != nil {
					secrets = append(secrets, *volume.Secret.SecretName)
				}
			}
			if got := strings.Join(secrets, " "); got != tc.secrets {
				t.Errorf("mounted Secrets %q, want %q", got, tc.secrets)
			}
		})
	}
	if _, err := telemetry.ParseEndpoint(collector); err != nil {
		t.Error(err)
	}
}
