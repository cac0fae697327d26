// SPDX-License-Identifier: Apache-2.0

package front

import (
	"fmt"

	corev1 "k8s.io/api/core/v1"
	coreac "k8s.io/client-go/applyconfigurations/core/v1"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/controllers/moedeployment/desired"
)

// secretsMountPath is the parent of the mount paths of the Secrets of a request router.
const secretsMountPath = "/etc/semmoe/"

// secretMode makes the files of a Secret readable for the router, whose user ID depends on image and cluster. Only the
// containers of the pod can reach the volume.
const secretMode = 0o444

// secured reports whether clients need TLS or an API key.
func secured(moed *semmoev1.MoEDeployment) bool {
	return moed.Spec.Routing.TLS != nil || moed.Spec.Routing.Auth != nil
}

// routerSecret is a Secret that request routers read from a volume.
type routerSecret struct{ volume, name string }

func (s routerSecret) path() string { return secretsMountPath + s.volume }

// The volumes of the Secrets.
const (
	tlsVolume      = "tls"
	clientCAVolume = "client-ca"
	keysVolume     = "api-keys"
	// engineCAVolume contains the authorities of the engines, without the private key of the engines in the same Secret.
	engineCAVolume = "engine-ca"
	// collectorCAVolume contains the authorities of the collector of spans.
	collectorCAVolume = "collector-ca"
)

// routerSecrets returns the Secrets that the spec names. The operator does not read them: it has no right to.
func routerSecrets(moed *semmoev1.MoEDeployment) (secrets []routerSecret) {
	routing := moed.Spec.Routing
	if routing.TLS != nil {
		secrets = append(secrets, routerSecret{tlsVolume, routing.TLS.SecretName})
		if routing.TLS.ClientCASecretName != "" {
			secrets = append(secrets, routerSecret{clientCAVolume, routing.TLS.ClientCASecretName})
		}
	}
	if routing.Auth != nil {
		secrets = append(secrets, routerSecret{keysVolume, routing.Auth.SecretName})
	}
	if tls := moed.Spec.Engine.TLS; tls != nil {
		secrets = append(secrets, routerSecret{engineCAVolume, tls.SecretName})
	}
	if routing.Tracing != nil && routing.Tracing.CASecretName != "" {
		secrets = append(secrets, routerSecret{collectorCAVolume, routing.Tracing.CASecretName})
	}
	return secrets
}

// securityArgs returns the arguments for TLS and API keys.
func securityArgs(moed *semmoev1.MoEDeployment) (args []string) {
	for _, secret := range routerSecrets(moed) {
		switch secret.volume {
		case tlsVolume:
			args = append(args, "--tls-cert-file="+secret.path()+"/"+corev1.TLSCertKey, "--tls-key-file="+secret.path()+"/"+corev1.TLSPrivateKeyKey)
		case clientCAVolume:
			args = append(args, "--tls-client-ca-file="+secret.path()+"/"+corev1.ServiceAccountRootCAKey)
		case keysVolume:
			args = append(args, "--api-keys-dir="+secret.path())
		case engineCAVolume:
			args = append(args, "--engine-tls-ca-file="+secret.path()+"/"+corev1.ServiceAccountRootCAKey, "--engine-tls-server-name="+desired.EngineServerName(moed))
		}
	}
	if auth := moed.Spec.Routing.Auth; auth != nil {
		if auth.RequestsPerMinute != nil {
			args = append(args, fmt.Sprintf("--client-requests-per-minute=%d", *auth.RequestsPerMinute))
		}
		if auth.PendingLimit != nil {
			args = append(args, fmt.Sprintf("--client-pending-limit=%d", *auth.PendingLimit))
		}
	}
	return args
}

// mountSecrets mounts the Secrets into the router's container. A pod with a missing Secret does not start, and the pods
// before the change keep serving.
func mountSecrets(moed *semmoev1.MoEDeployment, pod *coreac.PodSpecApplyConfiguration) {
	for _, secret := range routerSecrets(moed) {
		pod.Containers[0].WithVolumeMounts(coreac.VolumeMount().WithName(secret.volume).WithMountPath(secret.path()).WithReadOnly(true))
		source := coreac.SecretVolumeSource().WithSecretName(secret.name).WithDefaultMode(secretMode)
		if secret.volume == engineCAVolume {
			source.WithItems(coreac.KeyToPath().WithKey(corev1.ServiceAccountRootCAKey).WithPath(corev1.ServiceAccountRootCAKey))
		}
		pod.WithVolumes(coreac.Volume().WithName(secret.volume).WithSecret(source))
	}
}
