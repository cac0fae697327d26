package inspection

import (
	"path"

	corev1 "k8s.io/api/core/v1"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
)

const datasetMountPath = "/dataset"

// Dataset is where a container finds the data set, and what its pod needs for that.
type Dataset struct {
	Path    string
	Volumes []corev1.Volume
	Mounts  []corev1.VolumeMount
}

// DatasetFile is how a pod gets a data set. A path lies on the model's volume, which the pod has anyway.
func DatasetFile(spec semmoev1.DatasetSpec) Dataset {
	var source corev1.VolumeSource
	var file string
	switch {
	case spec.ConfigMap != nil:
		// The key is named here, so that the pod waits for it, and starts by itself once somebody adds it.
		file = spec.ConfigMap.Key
		source.ConfigMap = &corev1.ConfigMapVolumeSource{
			LocalObjectReference: corev1.LocalObjectReference{Name: spec.ConfigMap.Name},
			Items:                []corev1.KeyToPath{{Key: file, Path: file}},
		}
	case spec.PersistentVolumeClaim != nil:
		file = spec.PersistentVolumeClaim.Path
		source.PersistentVolumeClaim = &corev1.PersistentVolumeClaimVolumeSource{ClaimName: spec.PersistentVolumeClaim.ClaimName, ReadOnly: true}
	default:
		return Dataset{Path: spec.Path}
	}
	return Dataset{
		Path:    path.Join(datasetMountPath, file),
		Volumes: []corev1.Volume{{Name: semmoev1.DatasetVolume, VolumeSource: source}},
		Mounts:  []corev1.VolumeMount{{Name: semmoev1.DatasetVolume, MountPath: datasetMountPath, ReadOnly: true}},
	}
}
