{{/* Settings of the operator that say what sessions are made with. */}}
{{- define "gristmill.sessionSettings" -}}
{{- $sessions := .Values.sessions -}}
{{- $policy := .Values.networkPolicy -}}
{{- $settings := dict
      "METER_IMAGE" (include "gristmill.image" (list . .Values.meter.image))
      "METER_CPU" .Values.meter.cpu
      "METER_MEMORY" .Values.meter.memory
      "METER_LOG_LEVEL" .Values.meter.logLevel
      "IMAGE_PULL_POLICY" .Values.image.pullPolicy
      "IMAGE_PULL_SECRETS" (join "," $sessions.imagePullSecrets)
      "IMAGE_VOLUMES" $sessions.imageVolumes
      "STORAGE_CLASS" $sessions.storage.className
      "STORAGE_ACCESS_MODE" $sessions.storage.accessMode
      "WEIGHTS_CLASS" $sessions.weights.className
      "WEIGHTS_ACCESS_MODE" $sessions.weights.accessMode
      "WEIGHTS_SIZE" $sessions.weights.size
      "NODE_PATHS" $sessions.weights.nodePaths
      "WORKER_TMP_SIZE" $sessions.workerTmpSize
      "POD_SECURITY_VERSION" $sessions.podSecurityVersion
      "POD_ENVIRONMENT" (include "gristmill.sessionEnvironment" .)
      "DNS_NAMESPACE" $policy.dns.namespace
      "DNS_POD_LABEL" $policy.dns.podLabel
      "DNS_PORTS" (join "," $policy.dns.ports)
      "DNS_CIDRS" (join "," $policy.dns.cidrs)
      "POD_CIDRS" (join "," $policy.cluster.podCIDRs)
      "SERVICE_CIDRS" (join "," $policy.cluster.serviceCIDRs)
      "NODE_CIDRS" (join "," (uniq (concat $policy.cluster.nodeCIDRs (without $policy.apiServer.cidrs "0.0.0.0/0" "::/0"))))
      "HUB_CIDRS" (join "," $policy.hub.cidrs)
      "HUB_PORTS" (join "," $policy.hub.ports)
      "METRICS_NAMESPACE" $policy.metricsNamespace
      "NAMESPACE_DELETION" .Values.rbac.namespaceDeletion -}}
{{- range $name, $value := $settings }}
- name: GRISTMILL_OPERATOR_{{ $name }}
  value: {{ $value | quote }}
{{- end }}
{{- end }}

{{/* JSON: the environment of every container of a session. */}}
{{- define "gristmill.sessionEnvironment" -}}
{{- $made := dict -}}
{{- with .Values.proxy.http }}{{ $made = set $made "HTTP_PROXY" . }}{{ end -}}
{{- with .Values.proxy.https }}{{ $made = set $made "HTTPS_PROXY" . }}{{ end -}}
{{- if or .Values.proxy.http .Values.proxy.https .Values.proxy.none }}{{ $made = set $made "NO_PROXY" (include "gristmill.noProxy" .) }}{{ end -}}
{{- mergeOverwrite $made .Values.sessions.environment | toJson -}}
{{- end }}
