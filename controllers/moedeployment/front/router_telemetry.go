// SPDX-License-Identifier: Apache-2.0

package front

import (
	"fmt"

	corev1 "k8s.io/api/core/v1"
	coreac "k8s.io/client-go/applyconfigurations/core/v1"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
)

const (
	// The variables of the OpenTelemetry SDK, and the key of a Secret for the first one.
	exportHeadersVariable   = "OTEL_EXPORTER_OTLP_HEADERS"
	exportAuthorityVariable = "OTEL_EXPORTER_OTLP_CERTIFICATE"
	exportHeadersKey        = "headers"
)

// telemetryArgs returns the arguments for spans and the access log.
func telemetryArgs(routing semmoev1.RoutingSpec) (args []string) {
	if tracing := routing.Tracing; tracing != nil {
		args = append(args, "--otlp-endpoint="+tracing.Endpoint)
		if tracing.SamplePercent != nil {
			args = append(args, fmt.Sprintf("--trace-percent=%d", *tracing.SamplePercent))
		}
	}
	if percent := routing.AccessLogPercent; percent != nil {
		args = append(args, fmt.Sprintf("--access-log-percent=%d", *percent))
	}
	return args
}

// setExportVariables sets the variables for the export of spans. The headers stay in their Secret.
func setExportVariables(routing semmoev1.RoutingSpec, container *coreac.ContainerApplyConfiguration) {
	tracing := routing.Tracing
	if tracing == nil {
		return
	}
	if tracing.HeadersSecretName != "" {
		container.WithEnv(coreac.EnvVar().WithName(exportHeadersVariable).WithValueFrom(coreac.EnvVarSource().
			WithSecretKeyRef(coreac.SecretKeySelector().WithName(tracing.HeadersSecretName).WithKey(exportHeadersKey))))
	}
	if tracing.CASecretName != "" {
		container.WithEnv(coreac.EnvVar().WithName(exportAuthorityVariable).
			WithValue(routerSecret{volume: collectorCAVolume}.path() + "/" + corev1.ServiceAccountRootCAKey))
	}
}
