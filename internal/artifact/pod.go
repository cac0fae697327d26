// SPDX-License-Identifier: Apache-2.0

package artifact

import corev1 "k8s.io/api/core/v1"

const (
	// CAVariable is the environment variable with the CA certificate of the store, as PEM.
	CAVariable = "SEMMOE_STORE_CA"
	// URLVariable is the environment variable with the address of the store.
	URLVariable = "SEMMOE_STORE_URL"
	// TokenFile is the path of a pod's token for the store.
	TokenFile = "/var/run/secrets/semmoe.io/store/token"

	tokenDir     = "/var/run/secrets/semmoe.io/store"
	tokenVolume  = "semmoe-store-token"
	tokenSeconds = 3600
)

// TokenVolume returns a volume with the pod's token for the store.
func TokenVolume() corev1.Volume {
	seconds := int64(tokenSeconds)
	return corev1.Volume{Name: tokenVolume, VolumeSource: corev1.VolumeSource{Projected: &corev1.ProjectedVolumeSource{
		Sources: []corev1.VolumeProjection{{ServiceAccountToken: &corev1.ServiceAccountTokenProjection{
			Audience: Audience, ExpirationSeconds: &seconds, Path: "token",
		}}},
	}}}
}

// TokenMount returns the mount of TokenVolume.
func TokenMount() corev1.VolumeMount {
	return corev1.VolumeMount{Name: tokenVolume, MountPath: tokenDir, ReadOnly: true}
}
