{{/* Names do not depend on the release: there is one installation in a cluster. */}}
{{- define "gristmill.name" -}}gristmill{{- end }}

{{- define "gristmill.component" -}}gristmill-{{ . }}{{- end }}

{{- define "gristmill.selector" -}}
app.kubernetes.io/name: gristmill
app.kubernetes.io/component: {{ . }}
{{- end }}

{{/* Labels of an object. Call with (list $ "component"). */}}
{{- define "gristmill.labels" -}}
{{- $root := index . 0 -}}
{{ include "gristmill.selector" (index . 1) }}
app.kubernetes.io/instance: {{ $root.Release.Name }}
app.kubernetes.io/version: {{ $root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ $root.Release.Service }}
app.kubernetes.io/part-of: gristmill
helm.sh/chart: {{ printf "%s-%s" $root.Chart.Name $root.Chart.Version | replace "+" "_" }}
{{- with $root.Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* Reference of an image. Call with (list $ .Values.gateway.image). */}}
{{- define "gristmill.image" -}}
{{- $root := index . 0 -}}
{{- $image := index . 1 -}}
{{- $registry := $image.registry | default $root.Values.global.imageRegistry | trimSuffix "/" -}}
{{- $name := $image.repository -}}
{{- if $registry }}{{ $name = printf "%s/%s" $registry $name }}{{ end -}}
{{- if $image.digest -}}
{{ printf "%s@%s" $name $image.digest }}
{{- else -}}
{{ printf "%s:%s" $name ($image.tag | default $root.Values.image.tag | default $root.Chart.AppVersion) }}
{{- end -}}
{{- end }}

{{- define "gristmill.clusterKeySecret" -}}
{{ .Values.clusterKey.existingSecret | default "gristmill-cluster-key" }}
{{- end }}

{{- define "gristmill.ledgerURL" -}}
http://gristmill-ledger.{{ .Release.Namespace }}.svc:8460
{{- end }}

{{/* Name of the volume claim of the ledger. */}}
{{- define "gristmill.ledgerClaim" -}}
{{ .Values.ledger.persistence.existingClaim | default "gristmill-ledger" }}
{{- end }}
